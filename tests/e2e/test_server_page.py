"""The built-in pages, in Chromium: load, acceptance, a conversation, and the API's document."""

from __future__ import annotations

import dataclasses

import pytest
from playwright.sync_api import expect

from helpers.browser import chromium, needs_chromium
from helpers.chat_model import write_chat_model
from helpers.fake_engine import STATS, SUMMARY, FakeEngine
from helpers.http_server import running_app, running_server
from sametoken.serving.http.app import create_app
from sametoken.serving.http.config import ServerConfig
from sametoken.types.outputs import SpeculationMetrics

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = write_chat_model(tmp_path_factory.mktemp("served") / "model")
    options = {"served_model_name": ("tiny",), "api_key": ("secret",)}
    with running_server(model, engine={"speculative_config": NGRAM}, **options) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    with chromium() as launched:
        yield launched


@pytest.fixture
def visit(browser):
    """Opens a page, which must log nothing and ask nobody but its server."""
    opened, logged, asked = [], [], []

    def open_page(url: str, width: int = 1280, **options):
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        opened.append(page)
        page.on("pageerror", lambda error: logged.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: logged.append(message.text))
        page.goto(url)
        return page

    yield open_page
    for page in opened:
        page.close()
    assert [text for text in logged if "Failed to load resource" not in text] == []
    assert [url for url in asked if not url.startswith(("http://127.0.0.1:", "data:"))] == []


@pytest.fixture
def page(visit, server):
    return visit(server.url)


def send(page, text: str, key: str = "secret") -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_label("most tokens").fill("400")
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def test_a_conversation_and_what_it_did_to_acceptance(page, server):
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator("#model")).to_have_text("tiny")
    expect(page.locator("#positions-note")).to_contain_text("no drafts yet")
    send(page, "the inner the other the inner <b>the</b>")
    answer = page.locator(".turn.assistant")
    expect(answer.locator(".stats")).to_contain_text("tokens per step")
    expect(page.locator(".turn.user")).to_have_text("the inner the other the inner <b>the</b>")
    expect(page.locator("#positions-note")).to_contain_text("in the last")
    expect(page.locator("#positions li")).to_have_count(4)
    counters = server.engine.stats().speculation
    first = counters.acceptance_per_position[0]
    expect(page.locator("#positions .rate").first).to_have_text(f"{round(100 * first)}%")
    expect(page.locator("#finished")).to_have_text("1")


def test_a_wrong_key_is_told_and_the_next_message_may_be_right(page):
    send(page, "hello", key="wrong")
    expect(page.locator(".turn.error")).to_contain_text("API key")
    send(page, "hello")
    expect(page.locator(".stats")).to_be_visible()


def test_a_server_that_is_gone_is_told(page):
    expect(page.locator("#status")).to_have_text("ready")
    page.context.set_offline(True)
    expect(page.locator("#status")).to_have_text("not reachable")
    page.context.set_offline(False)
    expect(page.locator("#status")).to_have_text("ready")


HOSTILE = """<img src=x onerror="hit=1"> <script>hit=1</script> [a](javascript:hit=1)
[b](https://example.org) ![c](https://example.org/c.png) &lt;svg onload=hit=1>"""
MARKDOWN = "# Title\n\n```python\n" + "wide = 1; " * 20 + "\n```\n" + "\n- one" * 30
PLAIN_SUMMARY = dataclasses.replace(SUMMARY, method=None, num_speculative_tokens=0)
PLAIN_STATS = dataclasses.replace(STATS, speculation=SpeculationMetrics())


def echo(prompt: str, _) -> str:
    message = prompt.split("user\n")[-1].split("<|im_end|>")[0]
    return MARKDOWN if message == "long" else message


@pytest.fixture(scope="module")
def fake():
    """An engine that repeats a message, in windows of two drafts and a token of its own."""
    with running_app(create_app(FakeEngine(echo), ServerConfig())) as url:
        yield url


def test_markdown_is_rendered_and_accepted_drafts_are_green(visit, fake):
    page = visit(fake)
    expect(page.locator("#engine")).to_contain_text("ngram, up to 4 drafts a step")
    send(page, "**xyz** uvw")
    expect(page.locator(".stats")).to_contain_text("drafts accepted")
    expect(page.locator(".text strong")).to_have_text("xyz")
    # Windows: "**x", "yz*", "* u", "vw" and the end.
    assert page.locator(".accepted").all_text_contents() == ["yz", " ", "vw"]
    black, green = (
        page.locator(f".text {one}").first.evaluate("e => getComputedStyle(e).color")
        for one in ("strong", ".accepted")
    )
    assert black != green
    page.get_by_label("show accepted drafts in green").uncheck()
    assert page.locator(".accepted").first.evaluate("e => getComputedStyle(e).color") == black
    # Bytes of a character, and two steps that came as one event.
    tokens = [{"text": text, "accepted": False} for text in ("\ufffd", "\ufffd", "!", "a")]
    corrected = "tokens => (correct(tokens, [2, 0]), acceptedParts('é!a', tokens))"
    assert page.evaluate(corrected, tokens) == [[0, 1]]


def test_reasoning_is_dim_above_the_answer_and_never_green(visit):
    engine = FakeEngine("<think>hm **so**</think>**xyz** uvw")
    with running_app(create_app(engine, ServerConfig(reasoning_parser="qwen3"))) as url:
        page = visit(url)
        expect(page.locator("#engine")).to_contain_text("ngram, up to 4 drafts a step")
        send(page, "hello")
        expect(page.locator(".stats")).to_contain_text("drafts accepted")
        assert page.locator(".assistant > *").evaluate_all("all => all.map(e => e.className)") == [
            "reasoning",
            "text",
            "stats",
        ]
        assert page.locator(".reasoning").text_content() == "hm **so**"
        assert page.locator(".text").inner_text() == "xyz uvw"
        # Windows: "k>*", "*xy", "z**", " uv" and "w"; the first may hold marks.
        assert page.locator(".accepted").all_text_contents() == ["x", "z", " u", "w"]
        assert page.locator(".reasoning .accepted").count() == 0
        dim, stats = (
            page.locator(one).evaluate("e => getComputedStyle(e).color")
            for one in (".reasoning", ".stats")
        )
        assert dim == stats


def test_an_answer_cannot_run_or_load_anything(visit, fake):
    page = visit(fake)
    expect(page.locator("#status")).to_have_text("ready")
    send(page, HOSTILE)
    expect(page.locator(".stats")).to_be_visible()
    assert page.locator(".text :is(img, script, svg)").count() == 0
    links = page.locator(".text a").evaluate_all("all => all.map(a => [a.href, a.rel])")
    assert [href for href, _ in links] == ["https://example.org/", "https://example.org/c.png"]
    assert {rel for _, rel in links} == {"noopener noreferrer"}
    assert page.evaluate("typeof hit") == "undefined"


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_a_long_answer_is_followed_and_fits(visit, fake, width, scheme):
    page = visit(fake, width, color_scheme=scheme)
    expect(page.locator("#status")).to_have_text("ready")
    send(page, "long")
    expect(page.locator(".stats")).to_be_visible()
    at_end = "log => log.scrollHeight - log.scrollTop - log.clientHeight < 2"
    log = page.locator("#log")
    assert log.evaluate("log => log.scrollHeight > log.clientHeight")
    assert log.evaluate(at_end)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    # A reader who scrolled up stays there.
    log.evaluate("log => { log.scrollTop = 0; following(() => addTurn('user', 'more')); }")
    assert log.evaluate("log => log.scrollTop") == 0
    log.evaluate("log => { log.scrollTop = log.scrollHeight; }")
    log.evaluate("log => following(() => addTurn('user', 'more'))")
    assert log.evaluate(at_end)


def test_a_server_without_speculation_shows_nothing_of_it(visit):
    engine = FakeEngine("hello")
    engine.resolved, engine.stats = PLAIN_SUMMARY, lambda: PLAIN_STATS
    with running_app(create_app(engine, ServerConfig())) as url:
        page = visit(url)
        expect(page.locator("#engine")).to_contain_text("no speculation")
        send(page, "hello")
        expect(page.locator(".stats")).to_contain_text("tokens/s")
        assert "step" not in page.inner_text("body")
        assert "draft" not in page.inner_text("body").lower()
        assert engine.seen[0][1].logprobs is None


def test_the_document_of_the_api_needs_no_other_site(visit, fake):
    page = visit(f"{fake}/docs")
    page.locator("#operations-default-version_version_get").click()
    page.get_by_role("button", name="Try it out").click()
    page.get_by_role("button", name="Execute").click()
    expect(page.locator(".live-responses-table .response-col_status").last).to_contain_text("200")
