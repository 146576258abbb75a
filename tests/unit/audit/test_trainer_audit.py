"""What an audit of a trainer refuses before a model is looked for."""

from __future__ import annotations

import pytest

from sametoken.audit.trainer_audit import audit_trainer
from sametoken.audit.trainer_rollouts import ScoredRollout
from sametoken.config import EngineConfig
from sametoken.errors import ConfigError

ROLLOUT = ScoredRollout("1", (4, 5), 1, (-0.5,))


@pytest.mark.parametrize(("rollouts", "concurrency"), [((), 8), ((ROLLOUT,), 0)])
def test_nothing_to_score_is_refused(rollouts, concurrency):
    """Without rollouts there was no cause to state, at concurrency 0 no end."""
    config = EngineConfig.from_options(model="/no/model")
    with pytest.raises(ConfigError, match="rollouts cannot be scored"):
        audit_trainer(config, rollouts, concurrency=concurrency)


def test_scores_of_fast_prompts_are_refused():
    """They are not what the engine said of an answer, which it absorbs."""
    config = EngineConfig.from_options(model="/no/model", fast_prompts_from=2)
    with pytest.raises(ConfigError, match=r"fast_prompts_from=2 .* Leave the option out"):
        audit_trainer(config, (ROLLOUT,))
