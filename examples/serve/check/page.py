#!/usr/bin/env python3
"""The page of `serve run` in headless Chromium, which is spoken to through a pipe: Python's library is enough.

usage: page.py SERVE [--model FILE.gguf] [--screenshot FILE.png] [--pictures FOLDER] [--faults]

Draws the tree of some requests; shows no prompt without the key, nor without the operator's leave; takes a refused
message back, says when the server is gone or its engine has failed, and finds it again; compares (page_compare.py);
looks as it should (page_looks.py); with a model that chats, five chats stream at once and share their system message.
Exit 77 where there is no Chromium."""
import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import urllib.request

from browser import LIMIT, Browser, start
from page_compare import check_compare, check_faults, check_full, check_hides, check_wrong
from page_looks import check_labels, check_looks

SHAPE = {"dim": 64, "hidden_dim": 172, "num_layers": 2, "num_qo_heads": 8, "num_kv_heads": 4,
         "vocab_size": 300, "max_positions": 1024}
KEY = "a key for this check"


def complete(url, prompt, key=""):
    body = json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0}).encode()
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = "Bearer " + key
    urllib.request.urlopen(urllib.request.Request(url + "/v1/completions", body, headers), timeout=LIMIT).read()


DOCUMENTS = ["You are a clerk at a train station. The train to the coast leaves at nine and at five, from "
             "platform two, and takes three hours. There is a dining car.",
             "You are a cook. Today there is onion soup, trout with almonds, and a plum cake. Nothing else is left, "
             "and the kitchen closes at ten."]
QUESTIONS = ["When can I leave?", "What can I eat?", "What do you recommend to a child?", "Is it late already?"]


def chat(url, document, question):
    body = json.dumps({"messages": [{"role": "system", "content": document}, {"role": "user", "content": question}],
                       "max_tokens": 120, "temperature": 0.3}).encode()
    request = urllib.request.Request(url + "/v1/chat/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=10 * LIMIT).read()


def check_tree(browser, url):
    """A server without a key that shows texts: the tree is drawn."""
    for end in ("and one end", "and another", "with a third"):
        complete(url, "a beginning that three requests share, " + end)
    browser.open(url)
    browser.wait_for("document.querySelectorAll('.node').length >= 4")
    assert "a beginning" in browser.ask("document.querySelector('#draw').innerText")
    assert browser.ask("document.querySelector('#model').textContent"), "no name of the model"
    assert browser.ask("document.querySelector('#key').hidden"), "a key is asked for, and none is needed"
    boxes = browser.ask("[...document.querySelectorAll('.node')].map(n => n.getBoundingClientRect().width)")
    assert all(width > 0 for width in boxes), boxes
    check_labels(browser)


def check_key(browser, url):
    """With a key: counts for all, texts for those who have it."""
    complete(url, "a secret that no other tenant is to read", KEY)
    browser.open(url)
    browser.wait_for("document.querySelectorAll('.node').length >= 1 && !document.querySelector('#key').hidden")
    assert "secret" not in browser.ask("document.documentElement.outerHTML")
    assert "tokens" in browser.ask("document.querySelector('#draw').innerText")
    browser.ask("compare(); true")
    browser.wait_for("comparison === null")
    assert "Authorization: expected Bearer" in browser.ask("$('verdict').textContent")
    browser.ask(f"$('key').value = {json.dumps(KEY)}; $('key').onchange()")
    browser.wait_for("document.querySelector('#draw').innerText.includes('a secret')")
    browser.wait_for("document.querySelector('#model').textContent === 'random'")
    # What Chromium logs of the one refusal is no fault of the page.
    browser.errors = [error for error in browser.errors if "401" not in error]


def check_hidden(browser, url):
    """Without the operator's leave there are no texts."""
    complete(url, "a secret that no other tenant is to read")
    browser.open(url)
    browser.wait_for("document.querySelectorAll('.node').length >= 1")
    assert "secret" not in browser.ask("document.documentElement.outerHTML")


def check_refused(browser, url):
    """A message that is refused does not stay in the history (random weights have no chat)."""
    browser.open(url)
    browser.ask("$('ask').value = 'Hello?' + '\\nHello?'.repeat(60); send(); true")
    browser.wait_for("running === 0 && document.querySelector('.wrong') !== null")
    assert browser.ask("messages.length") == 0, "a refused message is sent again with the next one"
    assert browser.ask("$('ask').value").startswith("Hello?\nHello?")
    below = "$('says').scrollHeight - $('says').clientHeight"
    assert browser.ask(below) > 100 and browser.ask(f"$('says').scrollTop - ({below})") > -2, "the reason is not seen"
    # An engine that has failed, as /tree reports it.
    browser.ask("window.real = fetch; fetch = async (path, options) => path !== '/tree' ? real(path, options) : "
                "{ok: true, json: async () => Object.assign(await (await real(path, options)).json(), {failure: 'a reason'})}; "
                "true")
    browser.wait_for("$('model').textContent.includes('a reason')")
    browser.ask("fetch = real; true")
    browser.wait_for("$('model').textContent === 'random'")
    browser.errors.clear()  # what Chromium logs of the refusal


def check_restart(browser, serve, model):
    """A server that ends is missed, and found again."""
    process, url = start(serve, model)
    try:
        complete(url, "something that is counted")
        browser.open(url)
        browser.wait_for("$('model').textContent === 'random' && last !== null && last.generated_tokens > 0")
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=LIMIT)
        browser.wait_for("$('model').textContent.includes('does not answer')")
        process, _ = start(serve, model, "--name", "another", "--port", url.rsplit(":", 1)[1])
        browser.wait_for("$('model').textContent === 'another'")
        assert "-" not in browser.ask("$('rate').textContent"), "a rate below zero"
        browser.errors.clear()  # what Chromium logs of the time between
        browser.call("Page.navigate", url="about:blank")
    finally:
        process.kill()
        process.wait()


def check_chats(browser, url, screenshot):
    """Five chats at once below one system message."""
    browser.open(url, height=880, still=True)
    browser.wait_for("model !== '' && last !== null")
    browser.ask("compare(); true")
    browser.wait_for("comparison === null")
    browser.ask("$('ask').value = 'What is a tree?'; send(); true")
    browser.wait_for("running === 0 && document.querySelectorAll('.assistant .note').length === 1")
    assert len(browser.ask("document.querySelector('.assistant').innerText")) > 20
    # What became of the prompt in the cache shows when the note is touched.
    why = browser.ask("document.querySelector('.assistant summary').click(); document.querySelector('.why li').innerText")
    assert re.fullmatch(r"\d+ tokens? from 0: (found in the cache|never seen)", why), why
    # Others are there, too: their chats are about two documents.
    others = [threading.Thread(target=chat, args=(url, document, question))
              for document in DOCUMENTS for question in QUESTIONS]
    for other in others:
        other.start()
    browser.ask("many(); true")
    browser.wait_for("last.nodes.some(node => node.sequences >= 5) && running === 5")
    # The replies are some way on.
    browser.wait_for("[...document.querySelectorAll('.assistant')].slice(-5).every(box => box.innerText.length > 90)")
    time.sleep(0.6)  # what moves has moved
    if screenshot:
        browser.screenshot(screenshot)
    browser.wait_for("running === 0")
    for other in others:
        other.join()
    assert not browser.ask("document.querySelector('.wrong') !== null"), "a chat failed"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("serve")
    parser.add_argument("--model", default="", help="a GGUF file that can chat")
    parser.add_argument("--screenshot", default="", help="while five chats run; needs --model")
    parser.add_argument("--pictures", default="", help="a folder for pictures of a comparison, of --model if that is given")
    parser.add_argument("--faults", action="store_true", help="instead plant faults in the page, each of which is noticed")
    arguments = parser.parse_args()
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if not program:
        print("SKIPPED: the page needs Chromium (Debian: chromium)")
        return 77
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        shape = os.path.join(folder, "shape.json")
        with open(shape, "w", encoding="ascii") as file:
            json.dump(SHAPE, file)
        random = ["--random", shape]
        longer = os.path.join(folder, "longer.json")  # that has room for the page's own questions
        with open(longer, "w", encoding="ascii") as file:
            json.dump(SHAPE | {"dim": 256, "hidden_dim": 688, "num_qo_heads": 4, "num_kv_heads": 2, "max_positions": 4096}, file)
        long = ["--random", longer]
        model = ["--model", arguments.model] if arguments.model else long

        def looks(browser, url):
            complete(url, "something that was there before")
            check_looks(browser, url, arguments.pictures)

        def chats(browser, url):
            check_chats(browser, url, arguments.screenshot)
        cases = [(check_tree, random, ["--tree-texts"]),
                 (check_key, random, ["--tree-texts", "--api-key", KEY]),
                 (check_hidden, random, []), (check_refused, random, []),
                 (check_compare, long, ["--tree-texts"]), (check_wrong, long, []),
                 (check_full, long, ["--max-requests", "3"]), (check_hides, long, ["--hide-cached"]),
                 (looks, model, ["--tree-texts"])]
        if arguments.model:
            cases.append((chats, model, ["--tree-texts"]))
        if arguments.faults:
            cases = [(check_faults, long, [])]
        browser = Browser(program, os.path.join(folder, "profile"))
        try:
            if not arguments.faults:
                check_restart(browser, arguments.serve, random)
            for case, model, options in cases:
                process, url = start(arguments.serve, model, *options)
                try:
                    case(browser, url)
                    assert not browser.errors, browser.errors
                    browser.call("Page.navigate", url="about:blank")  # it misses no server that has ended
                finally:
                    process.send_signal(signal.SIGTERM)
                    process.wait(timeout=LIMIT)
        finally:
            browser.end()
    print(f"the page  {len(cases) + (not arguments.faults)} checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
