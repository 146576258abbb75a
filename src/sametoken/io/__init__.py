"""Files and JSON that somebody else wrote, read within bounds; files of our own, written whole."""
