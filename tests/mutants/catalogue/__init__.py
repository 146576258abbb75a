"""Bugs that other engines have shipped, each as a change of this one that a test must notice.

A mutant that changes tokens is caught by them. Most drafter bugs change no token at all:
those are caught by acceptance, or by a test of one position. Where a guard of the engine
raises before anything goes wrong, the mutant is there twice, the second time without it.
"""

from mutants.catalogue import (
    adapters,
    attention,
    commits,
    drafters,
    fast_prompts,
    inputs,
    kv_memory,
    latent_attention,
    lengths,
    ranks,
    recurrent,
    results,
    sampling,
)
from mutants.catalogue.planting import MUTANTS

#: Modules of mutants, in the order of a step: what it reads, computes, chooses and makes true.
SUBJECTS = (
    *(inputs, lengths, kv_memory, adapters),
    *(attention, latent_attention, recurrent, fast_prompts),
    *(sampling, ranks),
    *(commits, results, drafters),
)

#: Tests with the steps in which they must fail, and in which the suite runs them.
NAMED = {(one.test, one.steps) for one in MUTANTS}
