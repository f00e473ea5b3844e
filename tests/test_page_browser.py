"""The live page in Debian's Chromium, against a real server: talk, stop, fail, reload, look."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from k3offload.loading import load
from tests.helpers_serve import FIRST, ScriptedThread, Server, chatting
from tests.test_chat_parse import script

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None and not os.environ.get("K3OFFLOAD_REQUIRE_CHROMIUM"):
    pytest.skip("chromium is not installed", allow_module_level=True)

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright  # noqa: E402

KEY = "sesame"
PATIENCE = 20_000  #: milliseconds
HOSTILE = (
    "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    "\n```html\n<b>bold</b>" + 30 * " wide" + "\n```\n**not bold** &amp;"
)
#: pixels of a canvas that are not as the first one
DRAWN = """(id) => { const { width, height } = $(id);
  const all = $(id).getContext("2d").getImageData(0, 0, width, height).data;
  return new Uint32Array(all.buffer).filter((v, i, some) => v !== some[0]).length; }"""
pause = [0.0]  #: seconds before each layer


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with load(chatting(), sessions=2, context=512, sweep=64, cache="400k") as engine:
        engine.hooks.add(before_layer=lambda layer: time.sleep(pause[0]))
        with Server(engine) as server:
            yield server


@pytest.fixture(scope="module")
def scripted() -> Iterator[Server]:
    with load(chatting(), sessions=2, context=2048) as engine:
        with Server(engine, True, key=KEY) as server:
            yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM, "K3OFFLOAD_REQUIRE_CHROMIUM is set, and there is no chromium on the PATH"
    options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens the page of a server; in the end nothing has gone elsewhere or been complained of."""
    contexts, wrong = [], list[str]()
    expect.set_options(timeout=PATIENCE)

    def open_page(server: Server, **how: Any) -> Page:
        how = {"viewport": {"width": 1280, "height": 800}, **how}
        contexts.append(browser.new_context(**how))
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console",
            lambda message: None if _expected(message.text) else wrong.append(message.text),
        )
        page.on(
            "request",
            lambda r: None if r.url.startswith((server.url, "data:")) else wrong.append(r.url),
        )
        page.goto(server.url)
        return page

    yield open_page
    pause[0] = 0.0
    for context in contexts:
        context.close()
    assert not wrong, wrong


def _expected(text: str) -> bool:
    """Chromium itself tells of every refused or broken request."""
    return text.startswith("Failed to load resource")


def ask(page: Page, text: str = FIRST, **fields: str) -> Locator:
    """Send ``text``; the answer's element."""
    if fields:
        page.click("#set")
        for name, value in fields.items():
            page.fill(f"#{name}", value)
        page.keyboard.press("Escape")
    page.fill("#text", text)
    page.keyboard.press("Enter")
    return page.locator(".assistant").last


def until(page: Page, true: str) -> None:
    """Wait for what ``wait_for_function`` cannot ask again, for the page's policy forbids eval."""
    end = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(f"Boolean({true})"):
        assert time.monotonic() < end, true
        time.sleep(0.05)


def not_wider(page: Page) -> None:
    """Nothing but what scrolls by itself is wider than the window."""
    wide = page.evaluate(
        """() => [...document.querySelectorAll("body *")].filter((e) =>
        !e.closest("pre, .unseen") && e.getBoundingClientRect().right > innerWidth + 0.5)
        .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert not wide
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_it_answers_and_shows_the_engine(server: Server, opened: Callable[..., Page]) -> None:
    page = opened(server)
    expect(page.locator("#model")).to_have_text("nano")
    expect(page.locator("#empty")).to_be_visible()
    answer = ask(page, temperature="0", max_tokens="24")
    expect(answer.locator(".figures")).to_contain_text("a second")
    expect(answer).to_have_class(re.compile("done"))
    expected = server.chat(max_tokens=24).json()
    told = answer.locator(".words").text_content() or ""
    assert told == expected["choices"][0]["message"]["content"] and told
    figures = answer.locator(".figures").text_content() or ""
    usage = expected["usage"]
    assert figures.startswith(f"{usage['completion_tokens']} tokens in ")
    assert f"prompt {usage['prompt_tokens']}" in figures
    # the second question goes on from the first
    second = ask(page, "And of whom was he?")
    expect(second.locator(".figures")).to_contain_text("a second")
    asked = page.evaluate("JSON.parse(body()).messages.map((m) => m.role)")
    assert asked == ["user", "assistant", "user", "assistant"]
    # at rest the panel says what the engine does
    server.idle()
    until(page, "latest && !latest.sweep.busy && latest.rates.experts.requests === 0")
    counts = server.thread.engine.counts()["experts"]
    row = page.locator("#tiers tbody tr", has_text="experts")
    title = row.get_attribute("title") or ""
    assert title == (
        f"{counts.requests:,} requests: {counts.hits:,} hits, {counts.late:,} late, "
        f"{counts.misses:,} misses"
    )
    store = server.thread.engine.store
    assert store is not None
    expect(page.locator("#held")).to_have_text(f"{store.slots} in RAM, of 336")
    assert page.evaluate(DRAWN, "heat") > 100 and page.evaluate(DRAWN, "lanes") > 100


def test_nobody_watches_a_closed_page(server: Server, opened: Callable[..., Page]) -> None:
    disk = server.thread.engine.disk
    page = opened(server)
    until(page, "latest")
    assert disk._queue.watch is not None
    page.goto("about:blank")
    for _ in range(200):
        if disk._queue.watch is None:
            return
        time.sleep(0.02)
    raise AssertionError("the engine is still watched")


def test_escape_stops_and_it_can_be_tried_again(
    server: Server, opened: Callable[..., Page]
) -> None:
    page = opened(server)
    cancelled = server.thread.totals.cancelled
    pause[0] = 0.02
    answer = ask(page, temperature="0", max_tokens="24")
    expect(page.locator("#stop")).to_be_visible()
    expect(answer.locator(".words")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(answer.locator(".note")).to_contain_text("Stopped.")
    assert server.idle(2.0) < 2.0
    assert server.thread.totals.cancelled == cancelled + 1
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#text")).to_be_focused()
    assert page.evaluate("messages().length") == 1  # the model will not see it
    pause[0] = 0.0
    answer.get_by_role("button", name="Try again").click()
    expect(answer.locator(".figures")).to_contain_text("a second")
    expect(page.locator(".assistant")).to_have_count(1)
    assert (
        answer.locator(".words").text_content()
        == (server.chat(max_tokens=24).json()["choices"][0]["message"]["content"])
    )


def test_a_long_prompt_shows_how_long_it_takes(server: Server, opened: Callable[..., Page]) -> None:
    page = opened(server)
    until(page, "latest")
    server.chat(max_tokens=1)  # so that something was measured
    pause[0] = 0.03
    answer = ask(page, 40 * "And he said unto them. ", max_tokens="12")
    waiting = answer.locator(".wait")
    expect(waiting).to_have_text(
        re.compile(r"Reading its prompt, [\d,]+ of [\d,]+ tokens, about .*s left\.")
    )
    expect(waiting.locator(".bar > div")).to_have_attribute("style", re.compile(r"width: [1-9]"))
    expect(page.locator("#now")).to_contain_text("tokens of prompts")
    expect(page.locator("#jobs")).to_contain_text("reading its prompt")
    pause[0] = 0.0
    expect(answer.locator(".figures")).to_contain_text("first after")


def test_errors_say_what_to_do(server: Server, opened: Callable[..., Page]) -> None:
    page = opened(server)
    answer = ask(page, max_tokens="100000")
    expect(answer.locator(".note")).to_contain_text("context of 512")
    expect(page.locator("#said")).to_contain_text("context of 512")
    page.context.set_offline(True)
    answer.get_by_role("button", name="Try again").click()
    expect(answer.locator(".note")).to_contain_text("The server does not answer.")
    page.context.set_offline(False)
    page.click("#set")
    page.fill("#max_tokens", "3")
    page.click("text=Done")
    answer.get_by_role("button", name="Try again").click()
    expect(answer.locator(".figures")).to_contain_text("3 tokens in")
    expect(answer.locator(".note")).to_contain_text("Cut off")


def test_a_reload_keeps_the_conversation(server: Server, opened: Callable[..., Page]) -> None:
    page = opened(server)
    first = ask(page, temperature="0", max_tokens="20", system="Speak plainly.")
    expect(first.locator(".figures")).to_be_visible()
    told = first.locator(".words").text_content()
    assert told
    pause[0] = 0.02
    second = ask(page, "And then?", max_tokens="60")
    expect(second.locator(".words")).not_to_be_empty()
    page.fill("#text", "a draft")
    page.reload()
    expect(page.locator(".turn")).to_have_count(4)
    expect(page.locator(".assistant .words").first).to_have_text(told)
    expect(page.locator(".assistant .note").last).to_contain_text("was loaded again")
    expect(page.locator("#text")).to_have_value("a draft")
    assert page.evaluate("messages()[0]") == {"role": "system", "content": "Speak plainly."}
    assert server.idle(2.0) < 2.0
    page.click("#fresh")
    expect(page.locator("#fresh")).to_have_text("Discard?")
    page.click("#fresh")
    expect(page.locator(".turn")).to_have_count(0)
    page.reload()
    expect(page.locator("#empty")).to_be_visible()


def test_by_keyboard_alone(server: Server, opened: Callable[..., Page]) -> None:
    page = opened(server)
    until(page, "latest")
    press, focused = page.keyboard.press, page.locator("*:focus")
    expect(page.locator("#text")).to_be_focused()
    page.locator(".skip").focus()
    press("Enter")
    expect(page.locator("#text")).to_be_focused()
    page.locator(".skip").focus()
    order = []
    for _ in range(5):
        press("Tab")
        order.append(focused.get_attribute("id"))
    assert order == ["fresh", "set", "log", "text", "send"]
    for _ in range(3):
        press("Shift+Tab")
    press("Enter")  # Settings
    expect(page.locator("#system")).to_be_focused()
    for value in ("", "0", "", "12"):  # system prompt, temperature, top p, most tokens
        page.keyboard.type(value)
        press("Tab")
    press("Escape")
    expect(page.locator("#set")).to_be_focused()
    press("Tab")
    press("Tab")
    page.keyboard.type("One")
    press("Shift+Enter")
    page.keyboard.type("two")
    expect(page.locator("#text")).to_have_value("One\ntwo")
    press("Enter")
    expect(page.locator(".user .words")).to_have_text("One\ntwo")
    expect(page.locator(".figures")).to_contain_text("12 tokens in")
    expect(page.locator("#said")).to_contain_text("The answer is complete.")
    page.locator("#heat").focus()
    press("ArrowDown")
    press("ArrowDown")
    press("ArrowRight")
    expect(page.locator("#cell")).to_contain_text("Layer 2, expert 1: ")
    ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert ring == "solid"


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (820, "light")])
def test_narrow(server: Server, opened: Callable[..., Page], width: int, scheme: str) -> None:
    page = opened(server, viewport={"width": width, "height": 740}, color_scheme=scheme)
    until(page, "latest")
    not_wider(page)
    answer = ask(page, "word" * 60, max_tokens="8")
    expect(answer.locator(".figures")).to_be_visible()
    not_wider(page)
    expect(page.locator("#machine")).to_be_hidden()
    page.click("#fold")
    expect(page.locator("#fold")).to_have_attribute("aria-expanded", "true")
    expect(page.locator("#heat")).to_be_visible()
    not_wider(page)
    for name in ("#text", "#send"):
        box = page.locator(name).bounding_box()
        assert box is not None and box["y"] + box["height"] <= 740, name
    page.click("#set")
    not_wider(page)
    page.keyboard.press("Escape")


CONTRAST = """() => {
  const light = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const paper = light(colour("paper"));
  return ["ink", "soft", "wrong", "disk", "copy", "compute"].map((name) => {
    const own = light(colour(name));
    return (Math.max(own, paper) + 0.05) / (Math.min(own, paper) + 0.05); }); }"""


def test_light_and_dark_can_be_read(server: Server, opened: Callable[..., Page]) -> None:
    papers = set()
    for scheme in ("light", "dark"):
        page = opened(server, color_scheme=scheme, reduced_motion="reduce")
        papers.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        *text, disk, copy, compute = page.evaluate(CONTRAST)
        assert min(text) >= 4.5 and min(disk, copy, compute) >= 3, (scheme, text)
        until(page, "latest")
        assert page.evaluate("lanes.right() === lanes.lanes.end")  # nothing moves by itself
        durations = page.evaluate("getComputedStyle($('sweepline')).transitionDuration")
        assert durations == "0s"
    assert len(papers) == 2


def test_the_key_reasoning_and_words_that_would_be_markup(
    scripted: Server, opened: Callable[..., Page]
) -> None:
    page = opened(scripted)
    expect(page.locator("#keyed")).to_be_visible()
    expect(page.locator("#now")).to_contain_text("once the key is known")
    first = f"I think <b>hard</b>.§think»«response»{HOSTILE}§response»§message»■"
    assert isinstance(scripted.thread, ScriptedThread)
    scripted.thread.scripts.extend(map(script, (first, "§think»«response»Yes.§response»■")))
    answer = ask(page, max_tokens="600")
    expect(answer.locator(".note")).to_contain_text("The server asks for its key. Give it below")
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#keyed")).to_be_hidden()
    until(page, "latest")
    answer.get_by_role("button", name="Try again").click()
    expect(answer.locator(".figures")).to_contain_text("a second")
    thoughts = answer.locator(".thoughts")
    expect(thoughts.locator("summary")).to_have_text("Reasoning, 3 words")
    expect(thoughts.locator("div")).to_be_hidden()
    thoughts.locator("summary").click()
    expect(thoughts.locator("div")).to_have_text("I think <b>hard</b>.")
    text = answer.locator(".words").text_content() or ""
    assert "<img src=x onerror" in text and "**not bold** &amp;" in text
    expect(answer.locator("pre")).to_have_text(re.compile("^<b>bold</b> wide"))
    assert answer.locator("img, script, b").count() == 0 and page.title() == "nano on k3offload"
    assert page.evaluate("Object.keys(localStorage).length") == 0
    # reasoning stays part of what the model is told
    ask(page, "Go on.")
    expect(page.locator(".assistant .figures")).to_have_count(2)
    page.reload()
    expect(page.locator("#keyed")).to_be_hidden()
    sent = page.evaluate("messages()[1].reasoning_content")
    assert sent == "I think <b>hard</b>."


def test_the_page_allows_itself_nothing_else(server: Server) -> None:
    response = server.client.get("/")
    policy = dict(
        part.split(" ", 1) for part in response.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'" and "unsafe" not in str(policy)
    assert not re.search(r"(?:src|href)=\"(?!data:|#)|url\(|@import|innerHTML|://", response.text)
    assert "<!-- " not in response.text  # every part has found its place
    assert server.client.get("/openapi.json").json()["paths"].keys().isdisjoint({"/", "/live"})
