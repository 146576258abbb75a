"""Recurrent layers of any rule: rows that a pass folds, commits and leaves pending."""
