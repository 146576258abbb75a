"""From prompts to outputs."""
