"""report.html and `hetpipe watch` in a headless Chromium: nothing is loaded from elsewhere, no errors."""

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from browser import CHROMIUM, Tab, browser_tab
from hetpipe.reporting.pages import write_page
from hetpipe.runs.run_folder import RunFolder
from partition.plan_file import plan_text, read_plan
from run_folders import add_steps, made_up_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]
NO_SIDEWAYS = "document.documentElement.scrollWidth <= window.innerWidth"
FAULTS = """(() => {
    const found = [], overlap = (a, b, from, to) => Math.min(a[to], b[to]) - Math.max(a[from], b[from]);
    for (const svg of document.querySelectorAll("svg")) {
        const texts = [...svg.querySelectorAll("text")].map(
            (text) => [text.textContent, text.getBoundingClientRect()]);
        const frame = svg.getBoundingClientRect();
        texts.forEach(([text, box], index) => {
            if (box.height < 11) found.push(`tiny: ${text}`);
            if (box.left < frame.left - 2 || box.right > frame.right + 2) found.push(`cut: ${text}`);
            for (const [other, next] of texts.slice(index + 1)) {
                if (overlap(box, next, "left", "right") > 1 && overlap(box, next, "top", "bottom") > 4) {
                    found.push(`${text} is over ${other}`);
                }
            }
        });
    }
    return found;
})()"""
TIP = "(tip => tip.style.display === 'none' ? '' : tip.textContent)(document.getElementById('tip'))"


def test_a_report_is_drawn_without_network_and_tells_what_is_under_the_mouse(tmp_path: Path):
    run = made_up_run(tmp_path / "run", cluster_name="</script><b id='markup'>")
    add_steps(run, 30)
    plan = read_plan(run.plan)
    bounded = replace(plan.predicted, bound_s=plan.predicted.step_s / 1.1, bound_space="chains")
    run.write(run.plan, plan_text(replace(plan, predicted=bounded)))
    write_page(run)

    async def look(tab: Tab) -> None:
        address = run.page.as_uri()
        await tab.open(address)
        assert await tab.value("document.querySelectorAll('svg.timeline').length") == 2
        assert await tab.value("document.querySelectorAll('svg.timeline .forward').length") == 2 * 2 * 3
        edge = "getComputedStyle(document.querySelector('svg.timeline .forward')).stroke"
        assert await tab.value(edge) == "rgb(255, 255, 255)"
        narrow = "document.querySelector('svg.timeline .forward').classList.add('narrow')"
        assert await tab.value(f"{narrow}, {edge}") == "none"
        assert await tab.value("document.querySelectorAll('svg.chart').length") == 4
        assert await tab.value("document.getElementById('markup')") is None
        assert await tab.value("document.getElementById('bound').open") is False
        assert "chains" in await tab.value("document.querySelector('#bound p').textContent")
        assert "measured step" in await tab.value("document.getElementById('facts').textContent")
        await tab.point_at("svg.timeline .backward")
        await tab.until(f"({TIP}).includes('backward')")
        await tab.point_at("#memory .bar")
        await tab.until(f"({TIP}).includes('peak measured 90 B')")
        await tab.point_at("svg.chart rect[fill=transparent]")
        await tab.until(f"/step 1[0-9]: /.test({TIP})")
        assert await tab.value(NO_SIDEWAYS)
        assert tab.asked == [address, "data:,"] or tab.asked == [address]
        assert tab.errors == []

    asyncio.run(_with_tab(look))


@pytest.mark.parametrize("width", [1100, 400])
def test_all_words_of_a_report_are_read_on_screens_of_any_width(tmp_path: Path, width: int):
    run = made_up_run(tmp_path / "run", cluster_name="a_cluster_of_many_words_" * 5)
    add_steps(run, 30, eval_loss=1.5)
    write_page(run)

    async def look(tab: Tab) -> None:
        await tab.open(run.page.as_uri(), width=width)
        assert await tab.value(FAULTS) == []
        assert await tab.value(NO_SIDEWAYS)
        await tab.point_at("svg.timeline .backward")
        await tab.until(f"({TIP}).includes('backward')")
        box = "document.getElementById('tip').getBoundingClientRect()"
        assert await tab.value(f"{box}.left >= 0 && {box}.right <= window.innerWidth")

    asyncio.run(_with_tab(look))


def test_a_report_of_a_run_that_died_at_once_promises_no_curves(tmp_path: Path):
    run = made_up_run(tmp_path / "run", ended=False)
    write_page(run)

    async def look(tab: Tab) -> None:
        await tab.open(run.page.as_uri(), width=400)
        said = await tab.value("document.getElementById('page').textContent")
        assert "no metrics.jsonl here with two steps" in said
        assert "on the host that leads it" in said
        assert await tab.value(FAULTS) == []
        assert tab.errors == []

    asyncio.run(_with_tab(look))


def test_a_run_is_watched_until_it_is_over(tmp_path: Path):
    run = made_up_run(tmp_path / "run", ended=False)
    with subprocess.Popen(
        [sys.executable, "-m", "hetpipe", "watch", str(run.path)], stdout=subprocess.PIPE, text=True
    ) as watch:
        try:
            assert watch.stdout is not None
            address = watch.stdout.readline().split()[0]
            asyncio.run(_with_tab(lambda tab: _watch(tab, run, address)))
        finally:
            watch.send_signal(2)
            assert watch.wait(20) == 0


async def _watch(tab: Tab, run: RunFolder, address: str) -> None:
    await tab.open(address)
    assert await tab.value("document.querySelectorAll('svg.chart').length") == 0
    assert "come with the second step" in await tab.value("document.getElementById('curves').textContent")
    add_steps(run, 2)
    await tab.until("document.querySelectorAll('svg.chart').length === 4")
    assert "busy" in await tab.value("document.getElementById('devices').textContent")
    add_steps(run, 1, slow={"b/0": 1.75})
    await tab.until("document.getElementById('devices').textContent.includes('b/0 takes 1.75 times')")
    made_up_run(run.path)
    await tab.until("document.getElementById('facts')?.textContent.includes('measured step')")
    assert all(asked.startswith((address, "data:")) for asked in tab.asked)
    assert tab.errors == []
    text = run.plan.read_text()
    run.plan.write_text("{")  # as of a run that plans again, and writes
    await tab.open(address)
    assert "loaded again" in await tab.value("document.body.textContent")
    run.plan.write_text(text)
    await tab.until("document.querySelectorAll('svg.timeline').length === 2")


async def _with_tab(look) -> None:
    async with browser_tab() as tab:
        await look(tab)
