"""Draft heads: EAGLE, EAGLE-3 and multi-token prediction (MTP)."""
