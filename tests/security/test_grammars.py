"""Grammars as attacks: none stops the server, takes its memory, or slows others for long."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import random
import threading
import time

import httpx
import pytest
import torch

from helpers.budgets import resident_bytes
from helpers.chat_model import write_chat_model
from helpers.http_server import running_server
from helpers.structured import VOCAB, compiler, ids
from sametoken.errors import RequestError
from sametoken.sampling.grammar_masks import BudgetedMatcher, Cursor, MaskBudget
from sametoken.text.grammar.json_schema import MAX_NAME, check_schema
from sametoken.text.grammar.one_of import are_disjoint, disjoint
from sametoken.text.grammar.trials import TrialProcess
from sametoken.types.structured_outputs import MaskFault, StructuredOutputs

AMBIGUOUS = 'root ::= root root root | "a" | "b" | ""'


def properties(count: int) -> str:
    names = [f"property {i}" for i in range(count)]
    whole = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    return json.dumps(whole | {"required": names})


def chain(count: int) -> str:
    rules = (f'r{i} ::= "a" r{i + 1} | "b"' for i in range(count))
    return "\n".join(("root ::= r0", *rules, f'r{count} ::= "x"'))


SCHEMA_900 = StructuredOutputs(json_schema=properties(900))
RULES_2500 = StructuredOutputs(grammar=chain(2500))


@pytest.mark.parametrize("structured", [SCHEMA_900, RULES_2500])
def test_a_grammar_is_as_small_on_its_way_as_its_source(structured):
    """Serialized when compiled, these took 20 s and 47 s, and 228 MB and 688 MB."""
    grammar = compiler().compile(structured)
    began = time.perf_counter()
    payload = pickle.dumps(grammar)
    pickle.loads(payload).new_matcher()
    assert time.perf_counter() - began < 5
    assert len(payload) < 2**20


def test_the_longest_name_beside_any_others_is_compiled_in_a_small_stack():
    """The compiler recurses on its bytes."""
    named = {"type": "object", "properties": {"\U0001f600" * MAX_NAME: {}}}
    schema = named | {"additionalProperties": True}
    structured = StructuredOutputs(json_schema=json.dumps(schema, ensure_ascii=False))
    before = threading.stack_size(4 * 2**20)
    try:
        compiler().compile(structured)
    finally:
        threading.stack_size(before)


@pytest.mark.parametrize(
    ("schema", "cause"),
    [
        ('{"type": "integer", "minimum": %s}' % ("9" * 4000), "holds the number '999"),
        ('{"type": "integer", "minimum": %s}' % ("9" * 50_000), "holds the number '999"),
        ('{"type": "number", "maximum": 1e400}', "holds the number '1e400'"),
        ('{"type": "number", "maximum": -Infinity}', "holds the number '-Infinity'"),
        ('{"const": NaN}', "holds the number 'NaN'"),
        ('{"anyOf": []}', "anyOf is empty"),
        ('{"oneOf": []}', "oneOf is empty"),
        ('{"enum": []}', "enum is empty"),
        ('{"type": []}', "type is empty"),
        ('{"type": "integer", "type": "string"}', "has 'type' twice"),
        (json.dumps({"type": ["a" * 10] * 4000 + [1]}), "type is"),
        ('{"required": ["%s"]}' % ("a" * 60_000), "required names"),
        ('{"$ref": "%s"}' % ("a" * 60_000), "outside the schema"),
        ('{"properties": {"%s": {}}}' % ("a" * 60_000), "properties has the name 'aaa.* of 60000"),
        ('{"anyOf": [{}], "pattern": "%s"}' % ("a" * 60_000), "excludes pattern"),
        ("[" * 150 + "]" * 150, "not a JSON object"),
        ('{"minItems": "x", "type": "array"}', "not valid"),
    ],
)
def test_a_schema_out_of_range_is_refused_by_name_and_briefly(schema, cause):
    with pytest.raises(RequestError, match=cause) as caught:
        compiler().compile(StructuredOutputs(json_schema=schema))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "a^" * 30_000},
        {"json_schema": json.dumps({"type": "string", "pattern": "a^" * 30_000})},
        {"grammar": f'root ::= Regex("{"a^" * 30_000}")'},
    ],
)
def test_no_client_writes_into_the_log_by_an_expression(fields, capfd):
    """Each ^ was ignored, with 176 bytes in the server's log."""
    with pytest.raises(RequestError, match=r"has the anchor \^"):
        compiler().compile(StructuredOutputs(**fields))
    compiler().compile(StructuredOutputs(regex="^a" + r"\#" * 9000 + "$")).new_matcher()
    kinds = {name: {"properties": {"is": {"const": name}}} for name in ("a", "b")}
    for kind in kinds.values():
        kind |= {"type": "object", "required": ["is"]}
    either = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
    for schema in (
        {"anyOf": [{}], "a" * 60_000: 1},
        {"type": "object", "properties": {"x": either}, "$defs": kinds},
    ):
        compiler().compile(StructuredOutputs(json_schema=schema)).new_matcher()
    assert capfd.readouterr().err == ""


def test_libraries_that_try_a_grammar_write_nothing():
    process = TrialProcess()
    try:
        process.await_ready(compiler()._vocabulary)
        assert os.readlink(f"/proc/{process.pid}/fd/2") == "/dev/null"
    finally:
        process.kill()


def test_many_branches_of_one_of_are_told_apart_in_no_time():
    """3,500 constants took 42 s, pair by pair."""
    cat = {"type": "object", "required": ["kind"]}
    for branches in (
        [{"const": i} for i in range(3500)],
        [{"enum": [i, str(i)]} for i in range(2000)],
        [cat | {"properties": {"kind": {"const": i}}} for i in range(600)],
    ):
        began = time.perf_counter()
        check_schema(json.dumps({"oneOf": branches}))
        assert time.perf_counter() - began < 2
    for branch in ({"const": 1}, {"type": "object"}, {}):
        began = time.perf_counter()
        with pytest.raises(RequestError, match="oneOf has"):
            check_schema(json.dumps({"oneOf": [branch] * 2000}))
        assert time.perf_counter() - began < 2


def random_branch(chance: random.Random, depth: int = 0):
    kind = chance.randrange(7)
    names = chance.sample(["a", "b", "c"], chance.randint(0, 2))
    if kind == 0:
        return {"const": chance.randrange(9)}
    if kind == 1:
        return {"enum": chance.sample(range(12), chance.randint(1, 3))}
    if kind == 2:
        return {"type": chance.sample(["integer", "number", "string", "object"], 2)}
    if kind == 3:
        return {"type": chance.choice(["integer", "string", "null", "object", "boolean"])}
    if kind == 4 and depth:
        return chance.choice([True, {}])
    made = {name: random_branch(chance, depth + 1) for name in names} if depth < 2 else {}
    return {"type": "object", "properties": made, "required": sorted(made)}


def test_branches_are_told_apart_as_pair_by_pair():
    chance, results = random.Random(3), []
    for _ in range(4000):
        branches = [random_branch(chance) for _ in range(chance.randint(1, 4))]
        pairs = itertools.combinations(branches, 2)
        expected = all(are_disjoint(one, other) for one, other in pairs)
        assert disjoint(branches) == expected, branches
        results.append(expected)
    assert 400 < sum(results) < 3600


def test_a_mask_that_grows_with_the_text_ends_its_own_request():
    """Each mask took longer than the one before: 130 ms at 300 tokens, for everybody."""
    matcher = compiler().compile(StructuredOutputs(grammar=AMBIGUOUS)).new_matcher()
    cursor = Cursor(BudgetedMatcher(matcher, MaskBudget()), 0)
    began, slowest, num_tokens = time.thread_time(), 0.0, 0
    (a,) = ids("a")
    while not cursor.fault and num_tokens < 2000:
        before = time.thread_time()
        masks = torch.full((3, -(-VOCAB // 32)), -1, dtype=torch.int32)
        cursor.advance([a] if num_tokens else [], num_tokens, masks, [a, a])
        slowest = max(slowest, time.thread_time() - before)
        num_tokens += 1
    assert cursor.fault is MaskFault.SLOW
    assert not masks.any()
    assert time.thread_time() - began < 0.5 + 0.015 * num_tokens + 2 * slowest
    assert slowest < 2


def test_an_ordinary_grammar_stays_far_below_its_budget():
    matcher = compiler().compile(StructuredOutputs(json_object=True)).new_matcher()
    budget = MaskBudget()
    cursor = Cursor(BudgetedMatcher(matcher, budget), 0)
    text = ids(json.dumps({f"key {i}": [i, "text", {"a": None}] for i in range(40)}))
    for position in range(len(text)):
        masks = torch.full((2, -(-VOCAB // 32)), -1, dtype=torch.int32)
        newest = text[position - 1 : position]
        cursor.advance(newest, position, masks, text[position : position + 1])
        assert not cursor.fault
    assert budget.credit_s > 0.25


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = write_chat_model(tmp_path_factory.mktemp("grammars") / "model")
    with running_server(model) as running:
        yield running


def test_a_server_goes_on_beside_grammars(server):
    """Its event loop and its neighbours hardly notice; neither process grows."""
    process = server.engine._client.supervisor.process
    before = [resident_bytes(pid) for pid in (os.getpid(), process.pid)]

    async def scenario():
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

            async def complete(**fields):
                body = {"prompt": "hello", "max_tokens": 40, "seed": 1}
                return await client.post("/v1/completions", json=body | fields)

            # Libraries are imported, and a process started, at the first.
            assert (await complete(guided_regex="[ab]{3}")).status_code == 200
            slowest_health = 0.0

            async def poll(done: asyncio.Event):
                nonlocal slowest_health
                while not done.is_set():
                    began = time.monotonic()
                    assert (await client.get("/health")).status_code == 200
                    slowest_health = max(slowest_health, time.monotonic() - began)
                    await asyncio.sleep(0.02)

            done = asyncio.Event()
            polling = asyncio.create_task(poll(done))
            neighbour = asyncio.create_task(complete(max_tokens=300, ignore_eos=True))
            answers = await asyncio.gather(
                complete(guided_json=properties(900)),
                complete(guided_grammar=chain(2500)),
                complete(guided_grammar=AMBIGUOUS, max_tokens=450, min_tokens=450),
                complete(guided_json='{"anyOf": []}'),
            )
            again = await neighbour
            done.set()
            await polling
            return answers, again, slowest_health

    (schema, rules, ambiguous, empty), neighbour, slowest_health = asyncio.run(scenario())
    assert (schema.status_code, rules.status_code) == (200, 200)
    assert neighbour.json()["usage"]["completion_tokens"] == 300
    assert ambiguous.status_code == 400
    assert "took longer than" in ambiguous.json()["error"]["message"]
    assert empty.status_code == 400
    assert "anyOf is empty" in empty.json()["error"]["message"]
    assert slowest_health < 3
    after = [resident_bytes(pid) for pid in (os.getpid(), process.pid)]
    assert max(now - then for now, then in zip(after, before, strict=True)) < 400_000_000
