"""The page's comparison: what it sends and what it shows are recomputed from what went over the wire."""
import json
import re
import time
import urllib.request

from browser import LIMIT

# Records what the page sends and gets. A tree is of the run that was measured when it was asked for: 1 or 3 sets of
# counters were there by then.
RECORD = """
  window.sent = []; window.counts = []; window.trees = []; window.answers = {};
  window.original = window.original || fetch;
  window.fetch = async (path, options) => {
    const when = counts.length;
    if (options && options.body) {
      sent.push({path, body: JSON.parse(options.body)});
      if (answers[sent.length]) return answers[sent.length]();
    }
    const response = await original(path, options);
    if (path === '/metrics') counts.push(await response.clone().text());
    if (path === '/tree' && response.ok) trees.push({when, tree: await response.clone().json()});
    return response;
  };
  true"""
SHOWN = """[...document.querySelectorAll('#figures > div')].map(box => ({
  name: box.querySelector('h3').textContent,
  runs: [...box.querySelectorAll('.run')].map(run => ({
    label: run.querySelector('span').textContent, text: run.querySelector('b').textContent,
    width: parseFloat(run.querySelector('i').style.width), shared: run.classList.contains('shared')}))}))"""
ENDED = "comparison === null"


def value(text, name):
    return float(re.search(rf"^chunkattn_{re.escape(name)} (\S+)$", text, re.M)[1])


def grown(counts, run, name):
    return value(counts[2 * run + 1], name) - value(counts[2 * run], name)


def number(text):
    return float(re.match(r"[\d,.]+", text)[0].replace(",", ""))


def expected(browser, run):
    """What a run's four figures are, in the units that the page shows."""
    counts = browser.ask("counts")
    first, begun = (grown(counts, run, f"first_token_seconds_{what}") for what in ("sum", "count"))
    later = grown(counts, run, "request_seconds_sum") - first
    held = browser.ask(f"Math.max(...trees.filter(one => one.when === {2 * run + 1})"
                       ".map(({tree}) => tree.chunks.used * tree.chunk_bytes))")
    assert begun == 5, f"{begun} requests in run {run}"
    return [1000 * first / begun, 1000 * later / (grown(counts, run, "generated_tokens_total") - begun), held / 1e6,
            grown(counts, run, "cached_prompt_tokens_total")]


def check_figures(browser):
    shown, runs = browser.ask(SHOWN), [expected(browser, run) for run in (0, 1)]
    assert [figure["name"] for figure in shown] == ["Time to the first token", "Each token after it", "K/V held",
                                                    "Tokens not computed"], shown
    for i, figure in enumerate(shown):
        assert [run["label"] for run in figure["runs"]] == ["shared", "not shared"], figure
        assert [run["shared"] for run in figure["runs"]] == [True, False], figure
        most = max(runs[0][i], runs[1][i])
        for run, row in zip(runs, figure["runs"]):
            is_close = abs(number(row["text"]) - run[i]) <= max(0.06, 0.51 * (i == 0))
            assert is_close, f"{figure['name']}, {row}: expected {run[i]}"
            assert abs(row["width"] - 100 * run[i] / most) < 0.1, f"{figure['name']}, {row}: expected {run[i]} of {most}"
    # What sharing is for. Times depend on the machine; a fifth of the prompt's work is less on any.
    (first, _, held, cached), (own_first, _, own_held, own_cached) = runs
    assert own_cached == 0, f"{own_cached} tokens were found without sharing"
    prompts = grown(browser.ask("counts"), 0, "prompt_tokens_total")
    assert 0.6 * prompts < cached < 0.8 * prompts, f"{cached} of {prompts}: an earlier press has left something"
    assert held < own_held and first < own_first, runs
    verdict = browser.ask("$('verdict').textContent")
    assert f"{round(100 * held / own_held)} % of the K/V" in verdict, verdict
    assert f"{own_first / first:.1f} times sooner" in verdict, verdict
    measured = browser.ask("$('measured').textContent")
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        name = re.search(r"^model name\s*: (.*)$", file.read(), re.M)
    for words in (browser.ask("model"), f"{round(prompts):,} prompt tokens", name[1] if name else ""):
        assert words in measured, f"{words}: not in {measured}"
    texts = browser.ask("$('answers').innerText.length + $('answers').lastChild.textContent.length")
    assert texts > 100 and not browser.ask("$('answers').hidden"), "the answers are not shown"


def check_requests(browser):
    """The same five prompts twice; one salt, then five. Returns the salts."""
    sent = browser.ask("sent")
    warm = sent[:-10]  # before the first comparison, and not measured
    sent = sent[-10:]
    said = [{key: of for key, of in one["body"].items() if key != "cache_salt"} for one in sent]
    assert said[:5] == said[5:] and len({json.dumps(one) for one in said[:5]}) == 5, said
    salts = [one["body"].get("cache_salt", "") for one in sent]
    assert all(salts), "a request without a salt finds what is there"
    assert len(set(salts[:5])) == 1, f"the shared run does not share: {salts}"
    assert len(set(salts)) == 6, f"runs share with each other: {salts}"
    salts = set(salts)
    assert len(warm) <= 1 and not salts & {one["body"].get("cache_salt", "") for one in warm}, warm
    return salts


def cancelled(url):
    text = urllib.request.urlopen(url + "/metrics", timeout=LIMIT).read().decode()
    return value(text, 'choices_finished_total{reason="cancelled"}')


def idle(url):
    limit = time.monotonic() + LIMIT
    while json.load(urllib.request.urlopen(url + "/tree", timeout=LIMIT))["requests"]:
        assert time.monotonic() < limit, "requests go on that nobody waits for"
        time.sleep(0.1)


def check_compare(browser, url, pictures=None, page=None):
    """Two comparisons, from the keyboard; each begins with nothing."""
    browser.open(url, page=page)
    browser.wait_for("model !== '' && last !== null")
    salts = set()
    for _ in range(2):
        browser.ask(RECORD)
        for _ in range(20):
            if browser.ask("document.activeElement.id") == "run":
                break
            browser.press("Tab")
        assert browser.ask("document.activeElement.id") == "run", "Tab does not reach the button"
        outline = "getComputedStyle($('run')).outlineStyle"
        assert browser.ask(outline) == "solid", "where the focus is cannot be seen"
        browser.press("Enter")
        assert browser.ask("$('run').textContent") == "Stop"
        browser.wait_for("/Both runs take about \\d+ (s|minutes)\\.$/.test($('verdict').textContent)")
        promised, start = browser.ask("expected"), time.monotonic()
        browser.ask("$('ask').value = 'Hello?'; send(); many(); true")
        assert "comparison" in browser.ask("$('state').textContent") and browser.ask("running") == 0
        browser.wait_for(ENDED)
        took = time.monotonic() - start
        assert promised / 4 < took < promised * 4 + 1, f"{took:.1f} s, and {promised:.1f} were promised"
        assert not browser.ask("$('verdict').classList.contains('wrong')"), browser.ask("$('verdict').textContent")
        new = check_requests(browser)
        assert not new & salts, "a salt was used before"
        salts |= new
        check_figures(browser)
        seen = "trees.filter(one => one.when === {}).some(({{tree}}) => tree.nodes.filter(node => {}).length === {})"
        assert browser.ask(seen.format(1, "node.sequences === 5", 1)), "five never shared a node"
        assert browser.ask(seen.format(3, "node.parent === 0 && node.sequences === 1", 5)), "five never had their own"
        assert browser.ask("$('run').textContent") == "Compare again"
        browser.ask("window.fetch = original; true")
    # What is shared is no longer what the page came with: it says so.
    for system, words in (("Be brief.", "The system message was shortened, to 9 characters of 2,"), ("", "There is no system message now")):
        browser.ask(f"$('system').value = {json.dumps(system)}; true")
        verdict = press_and_wait(browser)
        assert words in verdict, f"{verdict}: expected {words}"
    browser.ask("$('system').value = $('system').defaultValue; true")


def press_and_wait(browser, answers="({})"):
    browser.ask(RECORD)
    browser.ask(f"window.answers = {answers}; compare(); true")
    browser.wait_for(ENDED)
    browser.ask("window.fetch = original; true")
    return browser.ask("$('verdict').textContent")


def check_wrong(browser, url, page=None):
    """Stopped, or with an error in the middle: in the server's words, and what was measured stays."""
    browser.open(url, page=page)
    browser.wait_for("model !== '' && last !== null")
    browser.ask("running = 1; compare(); true")
    assert "1 chat of this page" in browser.ask("$('verdict').textContent") and browser.ask(ENDED)
    browser.ask("running = 0; compare(); true")
    browser.wait_for("last.requests === 5")
    browser.ask("compare(); true")
    browser.wait_for(ENDED)
    assert browser.ask("$('verdict').textContent").endswith("stopped.")
    idle(url)
    before = cancelled(url)
    stream = "new Response('data: {}\\n\\n')"
    for answer, words in (
            (stream.format('{"error": {"message": "it has failed in the engine: planted"}}'),
             "it has failed in the engine: planted"),
            (stream.format('{"choices": [{"delta": {}, "cut_off": "deadline"}]}'), "cut the reply off: deadline"),
            (stream.format('{"choices": [{"text": "a"}], "usage": null}'), "the reply broke off"),
            ("new Response('<p>Bad gateway</p>', {status: 502, statusText: 'Bad'})", "HTTP 502 Bad: <p>Bad gateway"),
            ("Promise.reject(new TypeError('no network'))", "the server does not answer (no network)")):
        verdict = press_and_wait(browser, f"{{8: () => {answer}}}")
        assert verdict.startswith("Second run, not shared: ") and words in verdict, f"{verdict}: expected {words}"
        assert browser.ask("$('verdict').classList.contains('wrong')")
        for figure in browser.ask(SHOWN):
            assert figure["runs"][0]["width"] > 0 and figure["runs"][1]["text"] == "–", figure
        assert browser.ask("$('run').textContent") == "Compare"
        idle(url)
        now = cancelled(url)
        assert now > before, "the other requests went on to their end"
        before = now
    assert "times sooner" in press_and_wait(browser), "after an error the next press is as the first"
    assert "of others" not in browser.ask("$('measured').textContent")
    browser.ask("compare(); true")
    browser.wait_for("last.requests >= 5")
    body = json.dumps({"prompt": "somebody else", "max_tokens": 1}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=LIMIT).read()
    browser.wait_for(ENDED)
    assert "1 request of others began meanwhile" in browser.ask("$('measured').textContent")


def check_full(browser, url):
    """A server that takes three requests at once says so."""
    browser.open(url)
    browser.wait_for("model !== '' && last !== null")
    verdict = press_and_wait(browser)
    assert verdict.startswith("First run, shared: all 3 places for requests are taken"), verdict
    idle(url)
    browser.errors.clear()  # what Chromium logs of the refusals


def check_hides(browser, url):
    """--hide-cached: the figure that is hidden is not made up, and the tree is not called empty."""
    browser.open(url)
    browser.wait_for("model !== '' && last !== null")
    verdict = press_and_wait(browser)
    assert "times sooner" in verdict, verdict
    assert "--hide-cached" in browser.ask("$('figures').lastChild.textContent")
    assert "NaN" not in browser.ask("document.body.innerText")
    assert "--hide-cached" in browser.ask("$('empty').textContent")


# A fault in the page, and the check that has to notice it.
FAULTS = [
    ("i ? salt() : one", "one", check_compare),
    ("i ? salt() : one", "salt()", check_compare),
    ("const one = salt();", "const one = 'the same';", check_compare),
    ("temperature: 0, cache_salt}", "temperature: 0}", check_compare),
    ('i ? "run" : "run shared"', 'i ? "run shared" : "run"', check_compare),
    ("figure.of(runs[i])", "figure.of(runs[1 - i] || runs[i])", check_compare),
    ("100 * values[i] / most", "100 - 100 * values[i] / most", check_compare),
    ("tree.chunks.used * tree.chunk_bytes", "tree.chunks.used", check_compare),
    ("tree.chunks.used * tree.chunk_bytes", "(tree.chunks.used + tree.chunks.cached) * tree.chunk_bytes", check_compare),
    ('grown("first_token_seconds_sum") / count', 'grown("request_seconds_sum") / count', check_compare),
    ('(grown("generated_tokens_total") - count)', 'grown("generated_tokens_total")', check_compare),
    ("run.cached += cachedOf(usage);", "run.cached += usage.prompt_tokens;", check_compare),
    ("own.first / shared.first", "shared.first / own.first", check_compare),
    ("if (comparison) return comparison.abort();", "", check_wrong),
    ("outline: 2px solid var(--accent); outline-offset: 2px", "outline: none", check_compare),
    ("  if (!response.ok) throw new Error(await refusal(response));", "", check_wrong),
    ("if (data.error) throw new Error(data.error.message);", "if (data.error) continue;", check_wrong),
    ("stopped ? \"stopped.\" : error.message", "stopped ? \"stopped.\" : \"failed\"", check_wrong),
    ("    stop.abort();  // the other requests", "", check_wrong),
    ("if (choice.cut_off) throw", "if (choice.cut) throw", check_wrong),
    ("if (!whole || !usage) throw", "if (!whole && false) throw", check_wrong),
    ("  comparison = null;\n", "", check_wrong),
    ("expected = await warmUp(stop.signal);", "await warmUp(stop.signal);", check_compare),
    ("return left >= own ?", "return left >= 0 ?", check_compare),
]


def check_faults(browser, url):
    """Each planted fault is noticed."""
    text = urllib.request.urlopen(url, timeout=LIMIT).read().decode()
    for old, new, check in FAULTS:
        assert text.count(old) == 1, f"{old}: {text.count(old)} times in the page, expected 1"
        try:
            check(browser, url, page=text.replace(old, new))
        except AssertionError as error:
            print(f"  noticed: {old.strip()[:60]} → {new.strip()[:60]}: {str(error)[:90]}", flush=True)
        else:
            raise AssertionError(f"not noticed: {old} → {new}")
        browser.errors.clear()
        browser.call("Page.navigate", url="about:blank")
        idle(url)
