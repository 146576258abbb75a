"""Recurrent layers of any rule: what a pass folds, runs for good and leaves pending."""
