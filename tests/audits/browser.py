"""A headless Chromium for tests of pages: started once for a file, watched for errors, judged by axe-core.

The tests that use it are skipped where Chromium or a package is missing; `HOLDFAST_CHROMIUM` names another binary.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGES = ("playwright", "axe_playwright_python")
GRAVE = ("serious", "critical")


def missing() -> str:
    """Why there is no browser to test with; empty if there is one."""
    if _chromium() is None:
        return "there is no chromium on this machine"
    absent = [name for name in PACKAGES if find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def _chromium() -> str | None:
    return os.environ.get("HOLDFAST_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


@contextmanager
def launch() -> Iterator:
    """A playwright `Browser`; skips the test if there is none. Close it by leaving the block.

    Use it in a fixture of module scope: the start costs a second.
    """
    if reason := missing():
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    # Chromium in a container has neither the rights for its own sandbox nor, as a rule, a shared memory of its size.
    flags = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_chromium(), args=flags)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def no_console_errors(page) -> Iterator[None]:
    """Fails at the end of the block if the page logged an error or a warning, threw, or asked for what it did not get.

    A violation of the content security policy is such an error.
    """
    seen: list[str] = []

    def log(message) -> None:
        if message.type in ("error", "warning"):
            seen.append(f"{message.type}: {message.text}")

    def thrown(error) -> None:
        seen.append(f"thrown: {error}")

    def failed(request) -> None:
        seen.append(f"not loaded: {request.url[:200]}: {request.failure}")

    events = {"console": log, "pageerror": thrown, "requestfailed": failed}
    for event, listener in events.items():
        page.on(event, listener)
    try:
        yield
    finally:
        for event, listener in events.items():
            page.remove_listener(event, listener)
    assert not seen, "; ".join(seen)


def axe(page, *, within: str = "html") -> list[str]:
    """What axe-core finds serious or critical on the page as it is now: rule, and the elements that break it.

    `within` is a selector of the part to look at, which takes less time than the whole page.

    The script is run by the test's own connection to the browser, which the page's content security policy allows.
    """
    import axe_playwright_python

    if not page.evaluate("() => 'axe' in window"):
        page.evaluate((Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("within => axe.run(within, {resultTypes: ['violations']})", within)
    return [
        f"{rule['id']} ({rule['impact']}): {rule['help']}: "
        + "; ".join(node["html"][:160] for node in rule["nodes"][:5])
        for rule in found["violations"]
        if rule["impact"] in GRAVE
    ]
