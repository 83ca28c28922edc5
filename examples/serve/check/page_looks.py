"""How the page looks: on a phone and on a screen, dark, without motion, by keyboard; and pictures of that."""
import os
import time

SIZES = {390: 844, 1440: 900}
# Every label is within its node, in whole lines, and ends in an ellipsis where it does not fit.
CUT = """[...document.querySelectorAll('.node span')].filter(span => span.textContent).filter(span => {
    const at = span.getBoundingClientRect(), node = span.parentNode.getBoundingClientRect();
    return at.top < node.top - .5 || at.bottom > node.bottom + .5 || Math.abs(at.height / 17 - Math.round(at.height / 17)) > .01
      || at.right > node.right + .5 || getComputedStyle(span).textOverflow !== 'ellipsis';
  }).map(span => span.textContent)"""
# WCAG's contrast of what is written, with the nearest background below it.
CONTRAST = """(() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = colour => rgb(colour).slice(0, 3).map(c => c / 255).map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const ground = element => {
    for (; element; element = element.parentElement) {
      const colour = getComputedStyle(element).backgroundColor, parts = rgb(colour);
      if (parts.length === 3 || parts[3] > 0) return colour;
    }
    return 'rgb(255, 255, 255)';
  };
  return [...document.querySelectorAll('h1, h2, h3, p, span, b, button, summary, textarea, .big, .note, .said')]
    .filter(element => element.offsetWidth && (element.value || element.textContent).trim())
    .map(element => {
      const pair = [light(getComputedStyle(element).color), light(ground(element))];
      return [(Math.max(...pair) + .05) / (Math.min(...pair) + .05), element.id || element.className || element.tagName];
    }).sort((a, b) => a[0] - b[0])[0];
})()"""


def check_labels(browser):
    browser.wait_for("[...document.querySelectorAll('.node span')].some(span => span.textContent)")
    time.sleep(0.4)  # what moves has moved
    assert browser.ask(CUT) == [], f"cut through their letters: {browser.ask(CUT)}"


def check_size(browser, width):
    height = SIZES[width]
    overflow = browser.ask("document.documentElement.scrollWidth")
    assert overflow <= width, f"{overflow} pixels wide on a screen of {width}"
    tree = browser.ask("$('tree').getBoundingClientRect().toJSON()")
    chat = browser.ask("$('says').getBoundingClientRect().toJSON()")
    assert tree["height"] > 150 and browser.ask("scrollY") == 0
    if width > 800:
        assert tree["top"] >= 0 and tree["bottom"] <= height, f"the tree is at {tree} of {height}"
    else:  # a phone: the chat is on its first screen, and the tree follows
        send = browser.ask("$('send').getBoundingClientRect().bottom")
        assert 0 <= chat["top"] < send <= height, f"the chat is at {chat['top']} to {send} of {height}"
        assert send < tree["top"], "the tree is before the chat"
    check_labels(browser)


def check_keyboard(browser):
    """All that can be used is reached by Tab, and shows it. Arrow keys go through the tree."""
    browser.ask("document.activeElement.blur(); true")
    reached = {}
    for _ in range(30):
        browser.press("Tab")
        at = browser.ask("(e => [e.id || e.tagName, getComputedStyle(e).outlineStyle])(document.activeElement)")
        reached[at[0]] = at[1]
    for name in ("run", "says", "system", "ask", "send", "many", "fresh", "tree"):
        assert reached.get(name) == "solid", f"{name}: {reached}"
    browser.ask("$('tree').focus(); true")
    browser.press("ArrowDown")
    first = browser.ask("$('about').textContent")
    assert "token" in first and browser.ask("document.querySelectorAll('.node.chosen').length") == 1, first
    browser.press("ArrowDown")
    assert browser.ask("$('about').textContent") != first or browser.ask("nodes.length") == 1
    browser.press("Escape")
    assert browser.ask("document.querySelector('.node.chosen')") is None


def check_looks(browser, url, pictures=""):
    """Both widths, light and dark; before, during and after a comparison."""
    def picture(name):
        if pictures:
            os.makedirs(pictures, exist_ok=True)
            browser.screenshot(os.path.join(pictures, name + ".png"))

    grounds = set()
    for width, height in SIZES.items():
        for dark in (False, True):
            name = f"{width}-{'dark' if dark else 'light'}"
            browser.open(url, width, height, dark=dark)
            browser.wait_for("model !== '' && document.querySelectorAll('.node').length > 0")
            check_size(browser, width)
            picture(name + "-before")
            browser.ask("compare(); true")
            browser.wait_for("last.nodes.some(node => node.sequences === 5) && comparison !== null")
            picture(name + "-shared")
            browser.wait_for("last.nodes.filter(node => node.parent === 0 && node.sequences === 1).length === 5")
            top = browser.ask("$('tree').getBoundingClientRect().top")
            assert width <= 800 or 0 <= top < height - 150, f"the tree is at {top} of {height}: out of sight"
            check_labels(browser)
            picture(name + "-own")
            browser.wait_for("comparison === null")
            time.sleep(0.6)  # what moves has moved
            assert "sooner" in browser.ask("$('verdict').textContent"), browser.ask("$('verdict').textContent")
            assert browser.ask("document.documentElement.scrollWidth") <= width
            picture(name + "-after")
            least, where = browser.ask(CONTRAST)
            assert least >= 4.5, f"{name}: contrast {least:.2f} of {where}"
            grounds.add(browser.ask("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2, f"dark is as light: {grounds}"
    check_keyboard(browser)
    moving = "[...document.querySelectorAll('.node, .run i, .gauge i')].filter(e => " \
             "getComputedStyle(e).transitionDuration !== '0s').length"
    assert browser.ask(moving) > 0
    browser.open(url, still=True)
    browser.wait_for("document.querySelectorAll('.node').length > 0")
    assert browser.ask(moving) == 0, "it moves, although that is not wanted"
