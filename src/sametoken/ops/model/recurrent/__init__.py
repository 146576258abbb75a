"""Recurrent layers of any rule: the rows that a pass folds, commits and leaves pending."""
