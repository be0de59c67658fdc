"""The page in a real browser, over a fake service: talking, trees, sliders, replaying, keys and phones."""

from __future__ import annotations

import json

import pytest

from tests.serving import browser, console, eventually, live
from tests.unit.fake_service import FakeService, backend

pytestmark = pytest.mark.timeout(180)
WORDS = "Wörds 😀 of an answer,\nin two lines: <b>not bold</b>."


@pytest.fixture(scope="module")
def chrome():
    with browser() as one:
        yield one


@pytest.fixture
def page(chrome):
    """The page of a fresh server, ready; its service is at `page.service`."""
    from selenium.webdriver.common.by import By

    class Page:
        service = FakeService(lambda _: WORDS, per_round=4, round_s=0.01)

        def find(self, name):
            return chrome.find_element(By.ID, name)

        def all(self, selector):
            return chrome.find_elements(By.CSS_SELECTOR, selector)

        def text(self, name):
            return self.find(name).text

        def say(self, words):
            self.find("say").send_keys(words + "\n")

        def run(self, script, *arguments):
            return chrome.execute_script(script, *arguments)

        def done(self):
            return self.find("send").is_displayed()

        def asked(self):
            return [one for one in self.service.submitted if one.records]

    one = Page()
    with live(backend(one.service)) as url:
        one.url = url
        chrome.get(url)
        eventually(lambda: "toy" in one.text("model"))
        yield one
        assert console(chrome) == []


def answer_of(page):
    eventually(page.done)
    return page.all("#talk .turn.assistant")[-1].text


def test_a_message_brings_an_answer_and_its_trees(page):
    page.say("Hello")
    assert answer_of(page) == WORDS
    assert page.all("#talk b") == [], "what a model says is text, not markup"
    assert len(page.all("#tree .node.taken")) > 0
    assert len(page.all("#tree .node.left")) > 0
    assert len(page.all("#tree .node.root")) == 1
    assert float(page.text("speed")) > 0
    assert float(page.text("length")) > 1
    assert page.text("gain").endswith("\u00d7")
    assert "said the same" in page.text("same")
    assert len(page.all("#positions .bar")) > 1
    assert page.service.submitted[-1].mode == "off", "plain decoding is measured with the same request"
    page.say("And again")
    assert answer_of(page) == WORDS
    shown = page.service.tokenizer.decode_all(page.asked()[-1].prompt)
    assert shown.count("<|im_start|>user") == 2, "the second turn knows of the first"


def test_slider_and_switch_are_sent(page):
    from selenium.webdriver.common.keys import Keys

    slider = page.find("budget")
    slider.send_keys(Keys.ARROW_LEFT * 4)
    assert page.text("budget-shown") == "12"
    chain = page.all('#modes input[value="chain"]')[0]
    page.run("arguments[0].click()", chain)
    page.say("Hi")
    answer_of(page)
    asked = page.asked()[-1]
    assert (asked.mode, asked.budget) == ("chain", 12)


def test_keys_alone_are_enough(page):
    from selenium.webdriver.common.keys import Keys

    page.say("Hi")
    answer_of(page)
    tree = page.find("tree")
    tree.send_keys(Keys.ARROW_RIGHT)
    first = page.text("detail")
    assert "accepted" in first or "rejected" in first
    assert "%" in first
    tree.send_keys(Keys.ARROW_DOWN)
    assert page.text("detail") != first
    tree.send_keys(Keys.HOME)
    assert "anchor" in page.text("detail")
    slider = page.find("round")
    before = page.text("round-shown")
    slider.send_keys(Keys.HOME)
    assert page.text("round-shown").startswith("round 1 of")
    assert page.text("round-shown") != before
    order = page.run(
        "return [...document.querySelectorAll('button, input, textarea, [tabindex]')].map(e => e.tabIndex)"
    )
    assert all(place >= 0 for place in order)


def test_what_lies_behind_the_end_was_not_said(page):
    """A round whose path goes on after the tokens that it emitted."""
    kinds = page.run(
        """
        const { layOut } = await import("/ui/tree.js");
        const round = { tokens: [1, 2, 3, 4], texts: ["a", "b", "c", "d"], parents: [0, 0, 1, 0],
                        depths: [0, 1, 2, 1], probabilities: [1, 0.5, 0.4, 0.3], path: [0, 1, 2], emitted: ["b"] };
        return layOut(round).nodes.map((node) => node.kind);
        """
    )
    assert kinds == ["root", "taken", "left", "left"]


def test_probabilities_on_hover(page, chrome):
    from selenium.webdriver.common.action_chains import ActionChains

    page.say("Hi")
    answer_of(page)
    ActionChains(chrome).move_to_element(page.all("#tree .node.left")[0]).perform()
    tip = page.find("tip")
    assert tip.is_displayed()
    assert "rejected" in tip.text
    assert "%" in tip.text


def test_a_run_is_recorded_opened_and_replayed(page, tmp_path):
    page.say("Hi")
    answer_of(page)
    # What the Save button would download, read from the page's own link.
    document = page.run(
        """
        let made;
        const click = HTMLAnchorElement.prototype.click;
        const create = URL.createObjectURL;
        URL.createObjectURL = (blob) => { made = blob; return create(blob); };
        HTMLAnchorElement.prototype.click = () => {};
        document.getElementById("save").click();
        HTMLAnchorElement.prototype.click = click;
        URL.createObjectURL = create;
        return made.text();
        """
    )
    run = json.loads(document)
    assert (run["format"], run["version"]) == ("ddtree-run", 1)
    assert "".join(event["text"] for event in run["events"]) == WORDS
    saved = tmp_path / "run.json"
    saved.write_text(document)
    page.find("fresh").click()
    assert page.all("#talk .turn") == []
    page.find("file").send_keys(str(saved))
    eventually(lambda: page.text("round-shown").startswith("round 1 of"))
    assert page.all("#talk .turn.assistant")[0].text == WORDS
    page.find("play").click()
    eventually(lambda: "Stop" in page.text("play"))
    eventually(lambda: "Replay" in page.text("play"))
    rounds = sum(1 for event in run["events"] if event["round"])
    assert page.text("round-shown").startswith(f"round {rounds} of {rounds}")
    assert page.all("#talk .turn.assistant")[0].text == WORDS


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{", "no JSON"),
        ("{}", "no recorded run"),
        ('{"format": "ddtree-run", "version": 9, "events": []}', "version 9"),
        ('{"format": "ddtree-run", "version": 1, "events": [{"at": 0, "text": "x", "round": {}}]}', "damaged"),
        ('{"format": "ddtree-run", "version": 1, "events": 5}', "damaged"),
    ],
)
def test_files_that_are_no_runs(page, tmp_path, content, word):
    broken = tmp_path / "broken.json"
    broken.write_text(content)
    page.find("file").send_keys(str(broken))
    eventually(lambda: word in page.text("trouble"))


def test_stopping_an_answer(page):
    page.service.gate.clear()
    page.say("Hi")
    eventually(lambda: page.find("stop").is_displayed())
    page.find("stop").click()
    eventually(page.done)
    assert "stopped" in page.text("trouble")
    eventually(page.service.idle)
    page.service.gate.set()
    page.say("Hi")
    assert answer_of(page) == WORDS


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_can_be_read(page, theme):
    """Every text against its own background, by the formula of WCAG 2."""
    page.say("Hi")
    answer_of(page)
    while page.run("return document.documentElement.dataset.theme") != theme:
        page.find("theme").click()
    ratios = page.run(
        """
        const lines = ["--ink", "--quiet", "--accent", "--wrong", "--taken", "--bonus"];
        const style = getComputedStyle(document.documentElement);
        const light = (name) => {
          const box = document.createElement("i");
          box.style.color = style.getPropertyValue(name);
          document.body.append(box);
          const rgb = getComputedStyle(box).color.match(/[0-9.]+/g).slice(0, 3).map((v) => v / 255);
          box.remove();
          const [r, g, b] = rgb.map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
          return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        return lines.flatMap((line) => ["--page", "--card"].map((on) => ratio(light(line), light(on))))
          .concat(ratio(light("--on-accent"), light("--accent")));
        """
    )
    assert min(ratios) >= 4.5


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone(dark):
    service = FakeService(lambda _: WORDS, per_round=4)
    with live(backend(service)) as url, browser(390, 844, dark) as chrome:
        from selenium.webdriver.common.by import By

        chrome.get(url)
        eventually(lambda: "toy" in chrome.find_element(By.ID, "model").text)
        chrome.find_element(By.ID, "say").send_keys("Hi\n")
        eventually(lambda: "\u00d7" in chrome.find_element(By.ID, "gain").text)
        wide = chrome.execute_script("return document.documentElement.scrollWidth")
        assert wide <= 390, "nothing sticks out to the side"
        assert console(chrome) == []


def test_a_key_is_asked_for():
    from selenium.webdriver.common.by import By

    with live(backend(FakeService()), keys=["sesame"]) as url, browser() as chrome:
        chrome.get(url)
        eventually(lambda: "API key" in chrome.find_element(By.ID, "model").text)
        chrome.find_element(By.ID, "key").send_keys("sesame\t")
        eventually(lambda: "toy" in chrome.find_element(By.ID, "model").text)
