"""The page in a real browser: Chromium, driven by Playwright (`make test-browser`).

With `REVERIE_SCREENSHOTS=DIR`, every test writes a screenshot of its last state.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from reverie.api import UserError
from reverie.cli.main import main
from reverie.datasets.episodes import open_episodes
from reverie.play.load import MODES, load_run
from reverie.play.runs import RunIndex
from reverie.play.server import AccessCheck, Sessions, bind, make_app
from reverie.play.session import Session

pytestmark = pytest.mark.browser

TOKEN = "token"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WAIT = 30_000
"""Timeout in milliseconds."""


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("Chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"]
        )
        yield chromium
        chromium.close()


class Server:
    """The server in a thread, on a free port."""

    def __init__(self, make_sessions, runs=None):
        self.listener = bind("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}/?token={TOKEN}"
        self._make, self._runs = make_sessions, runs
        self.server = None
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.thread.start()

    async def _run(self):
        import uvicorn

        app = make_app(AccessCheck(TOKEN, "127.0.0.1"), self._make(), self._runs)
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        await self.server.serve(sockets=[self.listener])

    def close(self):
        self.server.should_exit = True
        self.thread.join(timeout=60)


@pytest.fixture
def serve():
    """A function that starts a server for a session, or for the runs of a folder."""
    servers = []

    def start(session=None, runs=None, open_run=None) -> Server:
        def sessions() -> Sessions:
            collection = Sessions(open_run)
            if session is not None:
                collection.add("", session)
            return collection

        servers.append(Server(sessions, runs))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def new_page(browser, request):
    """A function that opens a page; the test fails if a script of a page fails."""
    pages, errors = [], []

    def make(address, script="", **options):
        context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 960}, **options}
        )
        page = context.new_page()
        page.add_init_script(script)
        page.set_default_timeout(WAIT)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        pages.append(page)
        return page

    yield make
    if folder := os.environ.get("REVERIE_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        for number, page in enumerate(pages):
            name = f"{request.node.name.replace('/', '_')}-{number}.png"
            page.screenshot(path=str(Path(folder) / name), full_page=True)
    for page in pages:
        page.context.close()
    assert not errors


def wait_for_data(page, expression="true"):
    """Wait until the data of a view meets a condition on `data`; return the data."""
    condition = (
        f"() => {{ const data = window.page?.data; return data && ({expression}) }}"
    )
    page.wait_for_function(condition)
    return page.evaluate("window.page.data")


def pixels(page, pane):
    """Return the RGBA values of the image in a pane."""
    return page.evaluate(
        """(pane) => {
          const canvas = document.querySelector(`.pane.${pane} canvas`);
          const data = canvas.getContext("2d");
          return [...data.getImageData(0, 0, canvas.width, canvas.height).data];
        }""",
        pane,
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loaded", ["dreamer", "iris"], indirect=True)
def test_every_mode_is_shown(loaded, mode, serve, new_page):
    page = new_page(serve(Session(loaded, mode)).address)
    shown = wait_for_data(page, "data.step >= 2")
    assert shown["mode"] == mode
    assert page.locator("#modes [aria-checked=true]").inner_text() == MODES[mode]
    size = loaded.obs_space["image"].shape[0]
    for pane in ("real", "model"):
        canvas = page.locator(f".pane.{pane} canvas").first
        assert canvas.get_attribute("width") == str(size)
    assert len(pixels(page, "model")) == size * size * 4
    if mode == "recorded":
        page.locator("#episodes button").first.click()
        wait_for_data(page, "data.step >= 1")
        page.locator("#scrub").fill("1")
        assert wait_for_data(page, "data.paused && data.step === 1")["step"] == 1


def test_modes_are_changed_in_the_page(loaded, serve, new_page):
    page = new_page(serve(Session(loaded)).address)
    for mode, label in reversed(MODES.items()):
        page.get_by_role("radio", name=label).click()
        wait_for_data(page, f"data.mode === '{mode}'")


def test_keys_change_the_imagined_frames(loaded, serve, new_page):
    page = new_page(serve(Session(loaded, "human-model")).address)
    wait_for_data(page)
    frames = {}
    for key, name in (("ArrowLeft", "left"), ("ArrowRight", "right")):
        page.locator("#content").focus()
        if not page.evaluate("window.page.data.paused"):
            page.keyboard.press("p")
        wait_for_data(page, "data.paused")
        page.locator("#seed").fill("7")
        page.locator("#seed").blur()
        wait_for_data(page, "data.step === 0 && data.seed === 7 && data.paused")
        page.keyboard.down(key)
        page.keyboard.press(".")
        wait_for_data(page, f"data.step === 1 && data.action === '{name}'")
        page.keyboard.up(key)
        frames[name] = pixels(page, "model")
        page.locator("#seed").fill("8")
        page.locator("#seed").blur()
        wait_for_data(page, "data.seed === 8")
    assert frames["left"] != frames["right"]


def test_held_keys_are_released_on_blur(loaded, serve, new_page):
    page = new_page(serve(Session(loaded, "human-model")).address)
    wait_for_data(page)
    page.keyboard.down("ArrowLeft")
    wait_for_data(page, "data.action === 'left'")
    page.evaluate("window.dispatchEvent(new Event('blur'))")
    wait_for_data(page, "data.action === 'stay'")


def test_keys_can_be_mapped_to_others(loaded, serve, new_page):
    page = new_page(serve(Session(loaded, "human-model")).address)
    wait_for_data(page)
    page.locator("#keysbutton").click()
    page.locator("#remap-list button", has_text="left").click()
    page.keyboard.press("p")  # no longer a shortcut of the page
    page.locator("#remap-close").click()
    assert page.locator(".action kbd").first.inner_text() == "P"
    page.keyboard.down("p")
    wait_for_data(page, "data.action === 'left' && !data.paused")
    page.keyboard.up("p")


def test_buttons_on_the_screen_act(loaded, serve, new_page):
    page = new_page(
        serve(Session(loaded, "human-env")).address,
        viewport={"width": 390, "height": 844},
        has_touch=True,
    )
    wait_for_data(page)
    button = page.locator(".action", has_text="right")
    button.scroll_into_view_if_needed()
    box = button.bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + 8)
    page.mouse.down()
    wait_for_data(page, "data.action === 'right'")
    page.mouse.up()
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390


GAMEPAD = """
const buttons = Array.from({ length: 16 }, () => ({ pressed: false }));
window.pad = { axes: [0, 0], buttons };
navigator.getGamepads = () => [window.pad];
"""


def test_a_gamepad_acts(loaded, serve, new_page):
    page = new_page(serve(Session(loaded, "human-env")).address, script=GAMEPAD)
    wait_for_data(page)
    page.evaluate("window.dispatchEvent(new Event('gamepadconnected'))")
    page.evaluate("window.pad.axes[0] = -1")
    wait_for_data(page, "data.action === 'left'")
    page.evaluate("window.pad.axes[0] = 0; window.pad.buttons[15].pressed = true")
    wait_for_data(page, "data.action === 'right'")
    page.evaluate("window.pad = null")  # disconnected
    wait_for_data(page, "data.action === 'stay'")


@pytest.mark.parametrize("loaded", ["sliders"], indirect=True)
def test_sliders_and_axes_set_continuous_actions(loaded, serve, new_page):
    page = new_page(serve(Session(loaded, "human-env")).address, script=GAMEPAD)
    wait_for_data(page)
    assert page.locator(".slider input").count() == 2
    page.locator(".slider input").first.fill("0.5")
    wait_for_data(page, "data.action === '0.50 0.00'")
    page.evaluate("window.dispatchEvent(new Event('gamepadconnected'))")
    page.evaluate("window.pad.axes[1] = -1")
    wait_for_data(page, "data.action && data.action.endsWith(' -1.00')")


@pytest.mark.parametrize("loaded", ["two groups"], indirect=True)
def test_groups_of_keys_act_together(loaded, serve, new_page):
    page = new_page(serve(Session(loaded, "human-env")).address)
    wait_for_data(page)
    page.keyboard.down("2")
    page.keyboard.down("w")
    wait_for_data(page, "data.action === '1 1'")
    page.wait_for_function("() => document.querySelectorAll('.chosen').length === 2")
    page.keyboard.up("2")
    wait_for_data(page, "data.action === '0 1'")
    page.keyboard.up("w")


def test_fork_rollouts_take_over_and_speed(loaded, serve, new_page):
    page = new_page(serve(Session(loaded)).address)
    wait_for_data(page, "data.step >= 2")
    page.keyboard.press("p")
    wait_for_data(page, "data.paused")
    page.locator("#scrub").fill("1")
    wait_for_data(page, "data.step === 1")
    page.get_by_role("button", name="Imagine from here").click()
    wait_for_data(page, "data.fork === 1")
    page.locator("#rollouts").select_option("4")
    wait_for_data(page, "data.rollouts === 4")
    page.wait_for_function(
        "() => document.querySelectorAll('.pane.model').length === 4"
    )
    page.locator("#speed").select_option("4")
    wait_for_data(page, "data.speed === 4")
    page.locator("#content").focus()
    page.keyboard.press("t")
    assert wait_for_data(page, "data.human")["mode"] == "human-env"
    page.keyboard.press("t")
    wait_for_data(page, "!data.human")


def test_bc_learns_from_saved_episodes(run_folder, tmp_path, serve, new_page):
    copy = shutil.copytree(run_folder("dreamer"), tmp_path / "run")
    session = Session(load_run(copy), "human-env", ask_to_save=True)
    page = new_page(serve(session).address)
    page.locator("#save-dialog[open]").wait_for()
    page.keyboard.press("n")
    for episode in range(1, 4):
        wait_for_data(page, f"data.episode === {episode} && data.awaits_save_answer")
        page.locator("#save-dialog[open]").wait_for()
        page.keyboard.press("y")
    wait_for_data(page, "data.episode >= 4")
    data = copy / "recordings" / "env"
    assert len(open_episodes(data).names()) == 3
    flags = "--run.steps 2 --bc.batch_size 2 --device cpu --logger.outputs jsonl"
    clone = tmp_path / "clone"
    words = ["bc", "--bc.run", str(copy), "--offline.data", str(data)]
    assert main([*words, "--logdir", str(clone), *flags.split()]) == 0
    assert "train/loss" in (clone / "metrics.jsonl").read_text()


def test_the_page_reconnects(loaded, serve, new_page):
    page = new_page(serve(Session(loaded)).address)
    wait_for_data(page, "data.step >= 1")
    page.evaluate("window.page.connection.socket.close()")
    status = "document.querySelector('#connection-status').textContent"
    page.wait_for_function(f"() => {{ return {status} !== 'connected' }}")
    page.wait_for_function(f"() => {{ return {status} === 'connected' }}")
    number = wait_for_data(page)["number"]
    wait_for_data(page, f"data.number > {number} + 2")


def test_a_wrong_token_is_refused(loaded, serve, new_page):
    page = new_page(serve(Session(loaded)).address.replace(TOKEN, "other"))
    assert "token is missing or wrong" in page.content()


def test_one_of_two_pages_has_the_controls(loaded, serve, new_page):
    address = serve(Session(loaded)).address
    first, second = new_page(address), new_page(address)
    wait_for_data(second, "data.step >= 0")
    button = second.get_by_role("button", name="take the controls")
    button.wait_for()
    assert second.locator("#pause").is_disabled()
    button.click()
    second.locator("#pause:not([disabled])").click()
    wait_for_data(first, "data.paused")
    assert first.locator("#pause").is_disabled()


def test_unavailable_modes_show_the_reason(loaded, serve, new_page):
    loaded.missing["env"] = "the simulator is not installed"
    page = new_page(serve(Session(loaded, "human-model")).address)
    wait_for_data(page)
    tab = page.get_by_role("radio", name=MODES["agent-env"])
    assert tab.get_attribute("aria-disabled") == "true"
    tab.click(force=True)
    assert "not installed" in page.locator("#reason").inner_text()


def test_colors_can_be_changed_and_everything_has_a_label(loaded, serve, new_page):
    page = new_page(serve(Session(loaded)).address, color_scheme="dark")
    wait_for_data(page, "data.step >= 1")
    color = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(color)
    page.locator("#theme").click()
    assert page.evaluate(color) != dark
    unlabeled = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, canvas")]
        .filter((node) => node.offsetParent && !(node.ariaLabel || node.textContent ||
          node.getAttribute("aria-label") || node.closest("label")))
        .map((node) => node.id || node.className)"""
    )
    assert not unlabeled


def test_runs_are_viewed_while_one_is_written(run_folder, tmp_path, serve, new_page):
    folder = tmp_path / "runs"
    for name in ("dreamer", "iris"):
        shutil.copytree(run_folder(name), folder / name)

    def open_run(key: str) -> Session:
        return Session(load_run(runs.folder_of(key)), "agent-env")

    runs = RunIndex(folder)
    page = new_page(serve(runs=runs, open_run=open_run).address)
    page.locator("#runs tbody tr").nth(1).wait_for()
    page.wait_for_function("() => window.page.lines.length === 2")
    page.locator("button.name", has_text="dreamer").click()
    page.locator("#config tr", has_text="task").first.wait_for()
    page.locator("#compare").select_option(label="iris")
    page.locator("#config tr.different", has_text="agent").first.wait_for()
    with (folder / "dreamer" / "scores.jsonl").open("a") as file:
        file.write(json.dumps({"step": 98765, "episode/score": 1.0}) + "\n")
    page.locator("#runs td", has_text="98,765").wait_for()
    (folder / "dreamer" / "about.json").write_text('[{"error": "it ended early"}]')
    page.locator("#failure", has_text="it ended early").wait_for()
    assert page.locator("#compare option:checked").inner_text() == "iris"
    page.locator("#open-play").click()
    wait_for_data(page, "data.step >= 1")
    page.go_back()
    page.locator("#run-episodes button").last.click()
    wait_for_data(page, "data.mode === 'recorded' && data.step >= 1")


def test_a_run_that_cannot_be_played_shows_the_reason(tmp_path, serve, new_page):
    def open_run(key: str) -> Session:
        raise UserError("The run has no checkpoint.\n  Fix: continue its training.")

    server = serve(runs=RunIndex(tmp_path), open_run=open_run)
    page = new_page(f"{server.address}&play=run")
    page.locator("#connection-status", has_text="not available").wait_for()
    assert "no checkpoint" in page.locator("#message").inner_text()


def test_several_rollouts_fit_into_the_row_of_the_real_frame(loaded, serve, new_page):
    page = new_page(serve(Session(loaded)).address)
    wait_for_data(page)
    panes = "[...document.querySelectorAll('.pane:not([hidden])')]"
    for count in ("2", "3", "4", "6", "8"):
        page.locator("#rollouts").select_option(count)
        wait_for_data(page, f"data.rollouts === {count}")
        page.wait_for_function(f"() => {panes}.length === {count} + 2")
        names = page.evaluate(f"{panes}.map((pane) => pane.classList[1])")
        assert names == ["real", *["model"] * int(count), "difference"]
        real, *others = page.evaluate(
            f"{panes}.map((pane) => pane.getBoundingClientRect().bottom)"
        )
        assert max(others) < real + 60


def test_an_exported_page_opens_without_a_server(run_folder, tmp_path, new_page):
    from reverie.play.export import export

    runs = RunIndex(run_folder("dreamer"))
    path = export(runs, tmp_path / "page")
    page = new_page(path.as_uri())
    page.locator("#sessions .pane canvas").first.wait_for()
    page.wait_for_function("() => window.page.lines.length === 1")
    assert page.locator("#sessions h3").count() == 2


def test_the_page_fits_a_large_screen(loaded, serve, new_page):
    page = new_page(
        serve(Session(loaded, "agent-model")).address,
        viewport={"width": 3840, "height": 2160},
    )
    wait_for_data(page, "data.step >= 1")
    size = page.evaluate("getComputedStyle(document.documentElement).fontSize")
    assert float(size.removesuffix("px")) > 18
