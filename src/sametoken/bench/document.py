"""What the commands keep of a measurement: one JSON object, the same for all of them.

Its keys: ``benchmark``, ``synthetic``, ``workload``, ``settings``, ``environment``, and
``results``, one for every concurrency or request rate. A result has numbers under the names of
``Summary``, and besides them ``runs``, ``timeline`` and ``traces``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sametoken.bench.report import Summary, environment, settings
from sametoken.bench.session import Session


def offline_document(
    title: str, session: Session, summaries: Sequence[Summary], more: Mapping[str, Any]
) -> dict[str, Any]:
    """The object of an offline measurement.

    Args:
        title: what was run.
        session: what was measured.
        summaries: one for every concurrency.
        more: of the workload, as JSON knows it.
    """
    workload = dataclasses.asdict(session.workload) | {"prompts": len(session.workload.prompts)}
    return {
        "benchmark": title,
        "synthetic": list(session.resolved.config.synthetic),
        "workload": workload | dict(more),
        "settings": settings(session.resolved),
        "environment": environment(session.resolved.device),
        "bandwidth": dataclasses.asdict(session.bandwidth),
        "traffic": dataclasses.asdict(session.traffic),
        "results": [dataclasses.asdict(summary) for summary in summaries],
    }
