"""The built-in page, in Chromium: status, live acceptance, and a conversation."""

from __future__ import annotations

import os

import pytest
import torch
from playwright.sync_api import expect

from helpers.browser import chromium, needs_chromium
from helpers.chat_model import write_chat_model
from helpers.http_server import running_server

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
WAIT_MS = 20_000

pytestmark = [needs_chromium, pytest.mark.xdist_group("server page")]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    torch.set_num_threads(1)
    model = write_chat_model(tmp_path_factory.mktemp("served") / "model")
    options = {"served_model_name": ("tiny",), "api_key": ("secret",)}
    with running_server(model, engine={"speculative_config": NGRAM}, **options) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    with chromium() as launched:
        yield launched


@pytest.fixture
def page(browser, server):
    """The page, with every message of its console and every address that it asked for."""
    opened = browser.new_page(viewport={"width": 1180, "height": 900})
    opened.seen_errors, opened.asked = [], []
    opened.on("pageerror", lambda error: opened.seen_errors.append(str(error)))
    opened.on("request", lambda request: opened.asked.append(request.url))
    opened.goto(server.url)
    yield opened
    opened.close()


def send(page, text: str, key: str = "secret") -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_label("most tokens").fill("40")
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def test_a_conversation_and_what_it_did_to_acceptance(page, server):
    expect(page.locator("#status")).to_have_text("ready", timeout=WAIT_MS)
    expect(page.locator("#model")).to_have_text("tiny")
    expect(page.locator("#positions-note")).to_contain_text("no drafts yet")
    send(page, "the inner the other the inner <b>the</b>")
    answer = page.locator(".turn.assistant")
    expect(answer.locator(".stats")).to_contain_text("tokens per step", timeout=WAIT_MS)
    expect(page.locator(".turn.user")).to_have_text("the inner the other the inner <b>the</b>")
    expect(page.locator("#positions-note")).to_contain_text("in the last", timeout=WAIT_MS)
    expect(page.locator("#positions li")).to_have_count(4)
    counters = server.engine.stats().speculation
    first = counters.acceptance_per_position[0]
    expect(page.locator("#positions .rate").first).to_have_text(f"{round(100 * first)}%")
    expect(page.locator("#finished")).to_have_text("1", timeout=WAIT_MS)
    if os.environ.get("SAMETOKEN_SCREENSHOT"):
        page.screenshot(path=os.environ["SAMETOKEN_SCREENSHOT"], full_page=True)
    assert page.seen_errors == []
    assert all(url.startswith((server.url, "data:")) for url in page.asked)


def test_a_wrong_key_is_told_and_the_next_message_may_be_right(page):
    send(page, "hello", key="wrong")
    expect(page.locator(".turn.error")).to_contain_text("API key", timeout=WAIT_MS)
    send(page, "hello")
    expect(page.locator(".stats")).to_be_visible(timeout=WAIT_MS)


def test_a_server_that_is_gone_is_told(page):
    expect(page.locator("#status")).to_have_text("ready", timeout=WAIT_MS)
    page.context.set_offline(True)
    expect(page.locator("#status")).to_have_text("not reachable", timeout=WAIT_MS)
    page.context.set_offline(False)
    expect(page.locator("#status")).to_have_text("ready", timeout=WAIT_MS)
