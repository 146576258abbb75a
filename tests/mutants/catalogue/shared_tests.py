"""Tests that mutants of several subjects fail."""

FEW = "tests/e2e/test_same_tokens.py::test_few_requests"
ACCEPTANCE = (
    "tests/e2e/test_acceptance.py::test_exactly_the_drafts_before_the_spoilt_one_are_accepted"
)
SELF, LOOKAHEAD = (f"{ACCEPTANCE}[{kind}-1-late-0.0]" for kind in ("self", "lookahead"))
FORMER_DRAFTS = "tests/e2e/test_acceptance.py::test_a_slot_s_next_request_has_no_drafts_at_first"
EAGLE_HEAD = (
    "tests/unit/drafters/test_eagle.py"
    "::test_kv_and_drafts_are_those_of_a_run_from_scratch[eagle3-3-0.0-flags4]"
)
MTP_MODULE = (
    "tests/unit/drafters/test_eagle.py"
    "::test_a_module_s_kv_and_drafts_are_those_of_a_run_from_scratch[qwen3_5-3-0.8]"
)
NEXTN = (
    "tests/unit/models/heads/test_nextn.py"
    "::test_logits_and_states_are_those_of_the_definition[reference]"
)
WINDOW = (
    "tests/e2e/test_sliding_window.py"
    "::test_requests_share_the_blocks_that_they_no_longer_see[right-1]"
)
NEMOTRON = "tests/e2e/test_nemotron_h_engine.py::test"
