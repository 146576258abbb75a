"""Operations around forward passes: inputs, verify, commit, draft rows, transfer."""
