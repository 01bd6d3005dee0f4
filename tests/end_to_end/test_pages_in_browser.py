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
    add_steps(run, 2)
    await tab.until("document.querySelectorAll('svg.chart').length === 4")
    assert "busy" in await tab.value("document.getElementById('devices').textContent")
    add_steps(run, 1, slow={"b/0": 1.75})
    await tab.until("document.getElementById('devices').textContent.includes('b/0 takes 1.75 times')")
    made_up_run(run.path)
    await tab.until("document.getElementById('facts')?.textContent.includes('measured step')")
    assert all(asked.startswith((address, "data:")) for asked in tab.asked)
    assert tab.errors == []


async def _with_tab(look) -> None:
    async with browser_tab() as tab:
        await look(tab)
