"""Operations of a step around its forward passes: inputs, verify, commit, draft rows, transfer."""
