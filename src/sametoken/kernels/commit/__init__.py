"""Judge windows of fixed shape and make their accepted tokens true."""
