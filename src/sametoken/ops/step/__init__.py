"""What a step does around its forward passes: inputs, verification, commit, draft rows."""
