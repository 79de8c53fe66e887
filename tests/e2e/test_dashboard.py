"""The dashboard in a real browser, while a real loop trains."""

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import tinker
from tinker import types

from skyrl_tinker.directories import Directories
from skyrl_tinker.store import api_keys, server_state
from skyrl_tinker.store.replay import unit_records
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.processes import identities, write_pid_file
from tests.api.support.process import launched_on
from tests.api.support.world import settings_for, write_facts
from tests.e2e.support.client import Client, datum, prompt, random_tokens, train
from tests.store.support.rows import create, new_session
from tests.support.browser import Browser, Page, browser, program
from tests.support.serve import Serve

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(program() is None, reason="no browser: apt-get install chromium"),
]
STEPS = "Number(document.querySelector('section[aria-label=\"Last step\"] dd')?.innerText ?? 0)"
"""Number of the last step that the page shows."""
REWARD = "document.querySelector('section[aria-label=\"Reward\"] .u-legend')?.innerText ?? ''"
REPORTED = REWARD.replace("Reward", "Reported by the script")
"""Legends of the curves of the reward and of another number, which have their last values."""
CHOOSE = """(() => {{
    const labels = [...document.querySelectorAll('label')];
    const select = labels.find((each) => each.innerText.startsWith('{}')).querySelector('select');
    select.value = '{}';
    select.dispatchEvent(new Event('change'));
}})()"""
LOGARITHMIC = (
    "[...document.querySelectorAll('label')].find((each) => each.innerText === 'logarithmic').click()"
)
RECORD = """(() => {
    const kept = CanvasRenderingContext2D.prototype.fillText;
    window.drawn = new Set();
    CanvasRenderingContext2D.prototype.fillText = function (...all) {
        drawn.add(all[0]);
        return kept.apply(this, all);
    };
})()"""
"""Script that collects the numbers of axes, which are drawn, from then on."""
NAMELESS = "[...document.querySelectorAll('button, input, select, a, [role=region], [role=img]')]"
NAMELESS += ".filter((each) => !(each.innerText || each.ariaLabel || each.labels?.length)).length"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium") / "profile") as started:
        yield started


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    with chromium.page() as opened:
        opened.resize(1600, 1000)
        yield opened


ABOUT = "document.querySelector('section[aria-label=Run]')"
ONE_A_PAGE = """(() => {
    const kept = window.fetch;
    window.fetch = (url, ...more) => kept(String(url).replace("limit=200", "limit=1"), ...more);
})()"""
"""Script after which the list of runs has pages of one."""
BY_REWARD = "[...document.querySelectorAll('th button')].find((each) => each.innerText.startsWith('reward'))"
BY_NAME = "[...document.querySelectorAll('th button')].find((each) => each.innerText.startsWith('run'))"
ROWS = "[...document.querySelectorAll('td.run > div > a')].map((each) => each.innerText)"


def test_runs_are_found_by_their_names_and_sorted(server: Serve, page: Page) -> None:
    for name in ("sorted by name: b", "sorted by name: a"):
        with tinker.ServiceClient(base_url=server.url, api_key="tml-local", display_name=name) as service:
            service.create_lora_training_client(base_model="tiny", rank=8).result()
    page.open(f"{server.url}/#/runs")
    page.wait("document.querySelector('td.run a') !== null")
    page.run("document.querySelector('input[type=search]').focus()")
    page.type("sorted name:")
    page.wait(f"{ROWS}.length === 2")
    for expected in ("ab", "ba"):
        page.run(f"{BY_NAME}.click()")
        names = [f"sorted by name: {name}" for name in expected]
        page.wait(f"{ROWS}.join() === '{','.join(names)}'")
    page.run("document.querySelectorAll('td.check input').forEach((each) => each.click())")
    page.run("[...document.querySelectorAll('button')].find((each) => each.innerText === 'Compare').click()")
    page.wait("document.querySelector('h1')?.innerText === '2 runs compared'")
    compared = "[...document.querySelectorAll('td.run a')].map((each) => each.innerText)"
    assert page.run(compared) == ["sorted by name: b", "sorted by name: a"]
    page.run("document.querySelector('td.run a').click()")
    page.wait("document.querySelector('h1')?.innerText === 'sorted by name: b'")
    assert page.errors == []


DRAWN = "[...document.querySelectorAll('main > .curves section')].filter((each) => each.offsetParent)"
DRAWN += ".map((each) => each.ariaLabel)"
LOSSES = "document.querySelector('section[aria-label^=Loss] .u-legend').innerText"
PROJECTS = "[...document.querySelectorAll('td[data-label=project]')]"


def test_runs_have_their_projects_and_few_are_drawn_below_the_list(server: Serve, page: Page) -> None:
    named = {"overview: a": "maths", "overview: b": ""}
    for name, project in named.items():
        with tinker.ServiceClient(
            base_url=server.url, api_key="tml-local", display_name=name, project_id=project or None
        ) as service:
            training = service.create_lora_training_client(base_model="tiny", rank=8).result()
            train(training, random_tokens(6, seed=1))
            report = {"step": 1, "values": {"reward": 0.625}}
            of_run = f"console/runs/{training.model_id}/metrics"
            Client(server.url, service).post(of_run, report).raise_for_status()
    page.open(f"{server.url}/#/runs")
    page.wait("document.querySelector('td.run a') !== null")
    page.run("document.querySelector('input[type=search]').focus()")
    page.type("overview:")
    page.wait(f"{DRAWN}.join() === 'Reward,Loss per trained token' && {ROWS}.length === 2")
    page.wait(f"({REWARD}).includes('0.625')")
    assert all(name in page.run(LOSSES) for name in named)
    assert page.run(f"{PROJECTS}.map((each) => each.innerText)") == ["\u2013", "maths"]
    page.type(" b no-such-word")
    page.wait(f"{ROWS}.length === 0 && {DRAWN}.length === 0")
    page.wait("document.querySelector('p.quiet > span').innerText.startsWith('None found')")
    assert page.errors == []


def test_a_run_is_found_by_metadata_that_the_list_does_not_carry(server: Serve, page: Page) -> None:
    metadata = {f"entry-{place}": f"value-{place}" for place in range(1, 10)}
    with tinker.ServiceClient(base_url=server.url, api_key="tml-local", display_name="ninth") as service:
        service.create_lora_training_client(base_model="tiny", rank=8, user_metadata=metadata).result()
    page.open(f"{server.url}/#/runs")
    page.wait("document.querySelector('td.run a') !== null")
    page.run("document.querySelector('input[type=search]').focus()")
    page.type("entry-9=value-9")
    page.wait(f"{ROWS}.join() === 'ninth'")
    assert "value-9" not in page.run("document.querySelector('td.run').innerText")
    assert page.errors == []


def test_an_address_in_metadata_is_a_link_and_nothing_else_is(server: Serve, page: Page) -> None:
    link = 'https://wandb.example/team/runs/1?a=1&b="2"'
    others = {"script": "javascript:alert(1)", "plain": "http://a.b", "html": "<a href='https://a'>a</a>"}
    metadata = {"wandb_link": link, "late": f" {link}", **others}
    with tinker.ServiceClient(base_url=server.url, api_key="tml-local") as service:
        training = service.create_lora_training_client(base_model="tiny", rank=8, user_metadata=metadata)
        page.open(f"{server.url}/#/runs/{training.result().model_id}")
    page.wait(f"{ABOUT}?.innerText.includes('wandb_link')")
    of = "[each.innerText, each.getAttribute('href'), each.rel]"
    found = page.run(f"[...{ABOUT}.querySelectorAll('dd a')].map((each) => {of})")
    assert found == [[link, link, "noreferrer noopener"]]
    assert all(value in page.text() for value in others.values())
    assert page.errors == []


def test_of_many_runs_the_page_shows_the_first_in_the_chosen_order(server: Serve, page: Page) -> None:
    for name, reward in (("of many: b", 0.5), ("of many: a", 0.25)):
        with tinker.ServiceClient(base_url=server.url, api_key="tml-local", display_name=name) as service:
            run = service.create_lora_training_client(base_model="tiny", rank=8).result().model_id
            report = {"step": 1, "values": {"reward": reward}}
            Client(server.url, service).post(f"console/runs/{run}/metrics", report).raise_for_status()
    page.open(f"{server.url}/#/runs")
    page.wait("document.querySelector('td.run a') !== null")
    page.run("document.querySelector('input[type=search]').focus()")
    page.type("of many:")
    page.wait(f"{ROWS}.join() === 'of many: a,of many: b'")
    page.run(ONE_A_PAGE)
    page.wait(f"{ROWS}.join() === 'of many: a' && document.body.innerText.includes('the first 1 of 2 found')")
    page.run(f"{BY_REWARD}.click()")
    page.wait(f"{ROWS}.join() === 'of many: b'")
    assert page.errors == []


def test_a_run_and_the_one_that_goes_on_from_it_lead_to_each_other(server: Serve, page: Page) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-local", display_name="first half") as service:
        training = service.create_lora_training_client(base_model="tiny", rank=8).result()
        for _ in range(2):
            train(training, random_tokens(6, seed=1))
        path, first = training.save_state("half").result().path, training.model_id
    with tinker.ServiceClient(
        base_url=server.url, api_key="tml-local", display_name="second half"
    ) as service:
        training = service.create_training_client_from_state_with_optimizer(path).result()
        train(training, random_tokens(6, seed=1))
        second = training.model_id
    page.open(f"{server.url}/#/runs")
    row = "[...document.querySelectorAll('td.run')].find((each) => each.innerText.startsWith('first half'))"
    page.wait(f"{row}?.innerText.includes('continued by second half')")
    page.run(f"location.hash = '#/runs/{first}'")
    for told, title in (
        ("continued by\nsecond half", "second half"),
        ("continues\nfirst half", "first half"),
    ):
        page.wait(f"{ABOUT}?.innerText.includes({json.dumps(told + ' from step 2')})")
        page.run(f"[...{ABOUT}.querySelectorAll('a')].find((each) => each.innerText === '{title}').click()")
        page.wait(f"document.querySelector('h1')?.innerText === '{title}'")
    assert page.run("decodeURIComponent(location.hash)") == f"#/runs/{first}"
    assert second != first
    page.run(PLOTS)
    page.run(f"location.hash = '#/runs/{second}'")
    page.wait("plots[0]?.data[0].join() === '1,2,3'")
    assert page.run("plots[0].data[1].every((loss) => loss > 0)"), "the parent's come first"
    page.run("plots.length = 0")
    page.run(CHOOSE.format("Axis", "tokens"))
    step, *others = page.wait("plots[0]?.data[0].length === 3 && plots[0].data[0]")
    assert others == [2 * step, 3 * step]
    assert step >= 5, "tokens"
    assert page.errors == []


@contextmanager
def loop(client: Client) -> Iterator[tinker.TrainingClient]:
    """Samples, and steps that reinforce them, until the context ends."""
    training, ended = client.new_lora(), threading.Event()

    def reinforce() -> None:
        sampler = training.save_weights_and_get_sampling_client().result()
        asked = random_tokens(6, seed=3)
        report = {"step": 3, "values": {"reward": 0.625, "length": 6}}
        while not ended.is_set():
            params = types.SamplingParams(max_tokens=6, seed=1, stop=[])
            (answer,) = sampler.sample(prompt(asked), 1, params).result().sequences
            tokens = [*asked, *answer.tokens]
            silent = [0.0] * (len(asked) - 1)
            data = datum(
                tokens,
                logprobs=[*silent, *answer.logprobs],
                advantages=[*silent, *[1.0] * len(answer.tokens)],
            )
            training.forward_backward([data], "importance_sampling")
            training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            client.post(f"console/runs/{training.model_id}/metrics", report).raise_for_status()

    thread = threading.Thread(target=reinforce)
    thread.start()
    try:
        yield training
    finally:
        ended.set()
        thread.join()


UNEXPLAINED = "[...document.querySelectorAll('.curves section:has(.chart):not(:has(p.quiet))')]"
UNEXPLAINED += ".map((each) => each.ariaLabel)"


def test_the_pages_show_a_loop_while_it_trains_and_report_no_errors(
    server: Serve, client: Client, page: Page
) -> None:
    with loop(client) as training:
        page.open(server.url)
        page.wait("document.querySelector('.badge')?.innerText === 'ready'")
        assert "tiny" in page.text()
        assert "trainer rank" in page.text()
        assert "GPU memory" not in page.text(), "it has none"
        page.run("location.hash = '#/runs'")
        link = f"document.querySelector('a[href=\"#/runs/{training.model_id.replace(':', '%3A')}\"]')"
        page.wait(f"{link} !== null")
        page.run(f"{link}.click()")
        first = page.wait(STEPS)
        page.wait(f"{STEPS} > {first}")
        assert page.run("document.querySelectorAll('.curves canvas').length") == 11
        assert page.run(UNEXPLAINED) == []
        page.wait(f"({REWARD}).includes('0.625')")
        page.run(CHOOSE.format("Axis", "minutes"))
        page.wait(f"({REWARD}).includes('minutes') && ({REWARD}).includes('0.625')")
        page.run(CHOOSE.format("Axis", "tokens"))
        page.wait(f"({REWARD}).includes('tokens') && ({REWARD}).includes('0.625')")
        reported = 'section[aria-label="Reported by the script"] option'
        assert page.run(f"[...document.querySelectorAll('{reported}')].map((each) => each.value)") == [
            "length",
            "reward",
        ]
    assert page.errors == []


def test_curves_are_smoothed_and_logarithmic(server: Serve, client: Client, page: Page) -> None:
    run = client.new_lora().model_id
    for step, (reward, length) in enumerate(((0, 1), (0, 10), (0, 1000), (1, -5))):
        report = {"step": step, "values": {"reward": reward, "length": length}}
        client.post(f"console/runs/{run}/metrics", report).raise_for_status()
    page.open(f"{server.url}/#/runs/{run}")
    page.wait(f"({REPORTED}).trim().endsWith('\\u22125')")
    page.run(CHOOSE.format("Smoothing", "0.9"))
    page.wait(f"({REWARD}).trim().endsWith('0.2908')")  # 0.1 / (1 - 0.9**4)
    page.run(CHOOSE.format("Smoothing", "none"))
    page.run(RECORD)
    page.run(LOGARITHMIC)
    page.wait(f"({REPORTED}).trim().endsWith('1,000')")  # -5 has no place
    page.wait("['1', '10', '100', '1,000'].every((each) => drawn.has(each))")
    assert page.errors == []


DOTS = """import('./dashboard/charts.js').then(async (charts) => {{
    const {{node, draw}} = charts.{}("Loss", ["value"]);
    document.body.append(node);
    const frames = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    while (!node.clientWidth || node.querySelector("canvas").clientWidth !== node.clientWidth) await frames();
    const kept = Path2D.prototype.arc;
    const dots = new Set();
    Path2D.prototype.arc = function (...all) {{
        dots.add(`${{all[0]}} ${{all[1]}}`);
        return kept.apply(this, all);
    }};
    const values = {};
    draw([values.map((_, place) => place), values]);
    await frames();
    return dots.size;
}})"""
"""Script that draws a chart of these values and counts its dots."""


@pytest.mark.parametrize("chart", ["stepChart", "timeChart"])
@pytest.mark.parametrize(
    ("values", "dots"),
    [
        ([1, 2, None, 4], 3),
        ([1.0] * 2000, 0),
        ([*[1.0] * 1000, None, 7.0, None, *[2.0] * 1000, None, 3.0], 2),
    ],
    ids=["few", "many", "many with lone ones"],
)
def test_points_have_dots_where_there_is_room_and_where_they_stand_alone(
    server: Serve, page: Page, chart: str, values: list[float | None], dots: int
) -> None:
    page.open(server.url)
    page.wait("document.querySelector('.badge') !== null")
    assert page.run(DOTS.format(chart, json.dumps(values))) == dots
    assert page.errors == []


PLOTS = """(() => {
    const Plot = window.uPlot;
    window.plots = [];
    window.uPlot = function (...all) { return plots[plots.push(new Plot(...all)) - 1]; };
    Object.assign(window.uPlot, Plot);
})()"""
"""Script that keeps the charts that are made from then on."""


def test_a_reward_that_repeats_the_last_one_reaches_the_curve_of_the_list(server: Serve, page: Page) -> None:
    page.open(f"{server.url}/#/tokens")
    page.wait("document.querySelector('h1')?.innerText === 'Tokens'")
    page.run(PLOTS)
    page.run("location.hash = '#/runs'")
    page.wait("document.querySelector('input[type=search]') !== null")
    page.run("document.querySelector('input[type=search]').focus()")
    page.type("repeated:")
    drawn = "plots.find(({series}) => series[1].label === 'repeated: a')?.data.map(String).join(' ')"
    with tinker.ServiceClient(
        base_url=server.url, api_key="tml-local", display_name="repeated: a"
    ) as service:
        run = service.create_lora_training_client(base_model="tiny", rank=8).result().model_id
        for step, curve in ((1, "1 0.625"), (2, "1,2 0.625,0.625")):
            report = {"step": step, "values": {"reward": 0.625}}
            Client(server.url, service).post(f"console/runs/{run}/metrics", report).raise_for_status()
            page.wait(f"{drawn} === '{curve}'")
    assert page.errors == []


LACKING = "[...document.querySelectorAll('.curves p.small:not(.quiet)')]"
LACKING += ".filter((each) => each.offsetParent).map((each) => each.innerText)"


def test_a_part_that_was_chosen_stays_while_points_come_and_empty_charts_say_why(
    server: Serve, client: Client, page: Page
) -> None:
    training = client.new_lora()
    page.open(server.url)
    page.wait("document.querySelector('.badge') !== null")
    page.run(PLOTS)
    page.run(CHANGED.replace('endsWith("console/now")', 'includes("/points")'))
    page.run("change = ({columns: all}) => { all.loss = all.sampler_gap = all.step.map((at) => 1e-7 * at); }")
    page.run(f"location.hash = '#/runs/{training.model_id}'")
    page.wait(f"{LACKING}.length === 8 && {LACKING}.every((each) => each === 'No step yet.')")
    for _ in range(4):
        train(training, random_tokens(6, seed=1))
    page.wait("plots[0].data[0].length === 4")
    told = page.run(LACKING)
    assert "None: the data has no logprobs as sampled." in told
    assert "None: the data has no advantages." in told
    assert "No step yet." not in told
    shown = "document.querySelector('section[aria-label=\"{}\"]').offsetParent !== null"
    assert [
        page.run(shown.format(name)) for name in ("Policy shift", "Reward", "Reported by the script")
    ] == [True, False, False], "nothing was reported"
    assert page.run("[plots[1].data[1][3], plots[1].scales.y.max]") == [4e-7, 1e-3], "rounding is no gap"
    assert page.run("plots[0].scales.y.max - plots[0].scales.y.min") >= 1e-5, "nor a loss"
    page.run("plots[0].setScale('x', {min: 2, max: 3})")
    train(training, random_tokens(6, seed=1))
    page.wait("plots[1].data[0].length === 5 && plots[1].scales.x.max === 5")
    assert page.run("[plots[0].data[0].length, plots[0].scales.x.min, plots[0].scales.x.max]") == [5, 2, 3]
    assert page.errors == []


RANGE = """import('./dashboard/charts.js').then(async ({timeChart}) => {
    timeChart("Rates", ["value"]).draw([[0, 60, 120], %s]);
    await new Promise((done) => setTimeout(done));
    const {min, max} = plots.at(-1).scales.y;
    return [min, max];
})"""
"""Script that draws these rates, with the ends of their axis."""


@pytest.mark.parametrize(
    ("rates", "most"), [([1000, 1100, 1050], 1210), ([0, 0.25, None], 1), ([None, None, None], 1)]
)
def test_the_axis_of_rates_begins_at_zero(
    server: Serve, page: Page, rates: list[float | None], most: float
) -> None:
    page.open(f"{server.url}/#/tokens")
    page.wait("document.querySelector('h1')?.innerText === 'Tokens'")
    page.run(PLOTS)
    assert page.run(RANGE % json.dumps(rates)) == pytest.approx([0, most])
    assert page.errors == []


CHANGED = """(() => {
    const kept = window.fetch;
    window.change = () => {};
    window.fetch = async (url, ...more) => {
        const answer = await kept(url, ...more);
        if (!String(url).endsWith("console/now")) return answer;
        const now = await answer.json();
        change(now);
        return new Response(JSON.stringify(now), { headers: { "Content-Type": "application/json" } });
    };
})()"""
"""Script after which `change` may change what the server tells of this moment."""
RATES = "plots.at(-1).data[1]"
GAPS = f"{RATES}.filter((rate, place) => rate === null && {RATES}[place - 1] !== null).length"


LANE = """import('./dashboard/timeline.js').then(({timeline}) => {
    const lanes = timeline();
    document.body.append(lanes.node);
    lanes.draw([{ name: "run", title: "", slices: [{ from: 0, to: 3, parts: [], text: "" }] }], [0, 3]);
})"""
"""Script that draws a lane."""


def test_axes_of_time_say_their_zone(server: Serve, page: Page) -> None:
    page.call("Emulation.setTimezoneOverride", timezoneId="Asia/Kolkata")
    page.open(server.url)
    page.wait("/\\d\\d:\\d\\d:\\d\\d GMT\\+5:30/.test(document.querySelector('.u-legend')?.innerText)")
    assert page.run("document.querySelector('time').title").endswith(" GMT+5:30")
    page.run(LANE)
    assert "time in GMT+5:30" in page.run("document.querySelector('.lanes').innerText")
    assert page.errors == []


def test_where_rates_were_not_known_their_chart_has_a_gap(server: Serve, page: Page) -> None:
    page.open(f"{server.url}/#/tokens")
    page.wait("document.querySelector('h1')?.innerText === 'Tokens'")
    page.run(PLOTS)
    page.run(CHANGED)
    page.run("location.hash = '#/now'")
    page.wait(f"plots.length && {RATES}.length > 1 && {RATES}.at(-1) !== null")
    assert page.run(GAPS) == 0
    page.run("change = (now) => { now.rates = null; }")
    page.wait(f"{RATES}.at(-1) === null")
    page.run("change = () => {}")
    page.wait(f"{RATES}.at(-1) !== null && {GAPS} === 1")
    page.run("change = (now) => { now.at = new Date(Date.parse(now.at) + 60_000).toISOString(); }")
    page.wait(f"{RATES}.at(-1) !== null && {GAPS} === 2")
    assert page.errors == []


def test_of_several_base_models_each_has_its_state_and_memory(server: Serve, page: Page) -> None:
    page.open(f"{server.url}/#/runs")
    page.wait("document.querySelector('h1')?.innerText === 'Runs'")
    page.run(CHANGED)
    stopped = {"base_model": "other", "state": "stopped", "detail": "idle", "start": "on_demand"}
    asleep = stopped | {"since": "2026-01-01T00:00:00Z", "idle_s": 90, "rss_bytes": 2e9, "gpu_bytes": 3e9}
    bases = f"now.server.base_models.push({{...now.server.base_models[0], ...{json.dumps(asleep)}}})"
    page.run(f"change = (now) => {{ {bases}; }}")
    page.run("location.hash = '#/now'")
    rows = "[...document.querySelectorAll('section[aria-label=\"Base models\"] tbody tr')]"
    first, second = page.wait(f"{rows}.length === 2 && {rows}.map((each) => each.innerText)")
    assert "with the server" in first
    for fact in ("other", "stopped: idle", "days ago", "on demand", "90 s", "2 GB", "3 GB"):
        assert fact in second
    assert page.errors == []


REQUESTS = "[...document.querySelectorAll('tbody tr')].map((row) =>"
REQUESTS += "[row.querySelector('[data-label=kind]')?.innerText, row.querySelector('td.id a') !== null])"
FIRST_CELL = "[...document.querySelectorAll('tbody tr')].map((row) => row.querySelector('td').innerText)"
FOLLOW = "[...document.querySelectorAll('main a')].find((each) => each.innerText === '{}').click()"
PLACE = "document.querySelector('main p.row span')?.innerText ?? ''"


def test_tokens_of_a_run_are_chosen_by_kind_and_led_through_and_what_is_gone_is_no_link(
    server: Serve, page: Page
) -> None:
    runs = []
    for name in ("tokens: a", "tokens: b"):
        with tinker.ServiceClient(base_url=server.url, api_key="tml-local", display_name=name) as service:
            training = service.create_lora_training_client(base_model="tiny", rank=8).result()
            data = [datum(random_tokens(length, seed=length)) for length in (5, 6)]
            for run in (training.forward_backward, training.forward_backward, training.forward):
                run(data, "cross_entropy").result()
            runs.append(training.model_id)
    page.open(f"{server.url}/#/tokens")
    page.wait(f"document.querySelector('option[value=\"{runs[0]}\"]')?.innerText.startsWith('tokens: a, ')")
    page.run(CHOOSE.format("Run", runs[0]))
    page.wait(f"decodeURIComponent(location.hash) === '#/tokens/run/{runs[0]}'")
    page.wait(f"{REQUESTS}.length === 3")
    assert page.run(REQUESTS) == [["forward", True], ["forward_backward", True], ["forward_backward", True]]
    assert all(cell.startswith("cross_entropy, 2 datums\n") for cell in page.run(FIRST_CELL))
    page.run(CHOOSE.format("Kind", "forward_backward"))
    page.wait(f"{REQUESTS}.length === 2")
    page.run("document.querySelector('td.id a').click()")
    newest = page.wait(f"({PLACE}).endsWith(', 1 of 2') && location.hash")
    for link, place in (("Next", "2 of 2"), ("Previous", "1 of 2"), ("Earlier request", "1 of 2")):
        page.run(FOLLOW.format(link))
        page.wait(f"({PLACE}).endsWith(', {place}') && document.body.innerText.includes('Values')")
    page.wait(f"location.hash !== '{newest}/0' && document.body.innerText.includes('Later request')")
    page.run(FOLLOW.format("Later request"))
    page.wait(f"location.hash === '{newest}' && !document.body.innerText.includes('Later request')")
    page.wait("document.body.innerText.includes('weights of tokens: a, step 0')")
    page.run(FOLLOW.format("tokens: a"))
    page.wait(f"decodeURIComponent(location.hash) === '#/runs/{runs[0]}'")
    page.run("location.hash = '#/tokens'")
    page.wait(f"{REQUESTS}.length >= 4 && {REQUESTS}.every(([kind]) => kind === 'forward_backward')")
    page.run(CHOOSE.format("Kind", ""))
    page.wait(f"{REQUESTS}.length >= 6")
    assert page.errors == []


ITEMS = "[...document.querySelectorAll('section[aria-label^=Items] tbody td[data-label={}]')]"
ITEMS += ".map((each) => each.innerText)"
MORE = "document.querySelector('section[aria-label^=Items] button')"


def test_of_many_items_those_beside_the_one_that_is_looked_at_are_shown(server: Serve, page: Page) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-local", display_name="many items") as service:
        training = service.create_lora_training_client(base_model="tiny", rank=8).result()
        data = [datum(random_tokens(5, seed=1))] * 25
        training.forward(data, "cross_entropy").result()
    of = {"run": training.model_id, "kind": "forward"}
    (asked,) = httpx.get(f"{server.url}/api/v1/console/requests", params=of).json()["requests"]
    page.open(f"{server.url}/#/tokens/{asked['request_id']}/13")
    numbers = ITEMS.format("item")
    page.wait(f"{numbers}.length === 10")
    assert page.run(numbers) == [str(number) for number in range(11, 21)]
    assert "…" not in page.run(ITEMS.format("prompt"))[0], "it is whole"
    page.run(f"{MORE}.click()")
    assert page.run(numbers) == [str(number) for number in range(1, 26)]
    assert page.run(f"{MORE}.hidden")
    assert page.errors == []


def test_a_pass_whose_data_is_gone_is_no_link_and_says_so(server: Serve, page: Page) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-local", display_name="crowded") as service:
        training = service.create_lora_training_client(base_model="tiny", rank=8).result()
        data = [datum(random_tokens(5, seed=1))]
        for _ in range(unit_records.KEPT + 1):
            training.forward(data, "cross_entropy").result()
        run = training.model_id
    page.open(f"{server.url}/#/tokens/run/{run}")
    page.wait(f"{REQUESTS}.filter(([, linked]) => !linked).length === 1")
    assert page.run(FIRST_CELL)[-1] == "its data is no longer stored"
    of = {"run": run, "kind": "forward"}
    *_, gone = httpx.get(f"{server.url}/api/v1/console/requests", params=of).json()["requests"]
    page.run(f"location.hash = '#/tokens/{gone['request_id']}'")
    page.wait("document.querySelector('.failure')?.innerText.includes('no longer stored')")
    page.run(FOLLOW.format("All requests"))
    page.wait(f"{REQUESTS}.length > {unit_records.KEPT}")


PAINTED = """import('./dashboard/charts.js').then(async ({stepChart}) => {
    const {timeline} = await import('./dashboard/timeline.js');
    const chart = stepChart("Loss", ["value"]), lanes = timeline();
    document.body.append(chart.node, lanes.node);
    chart.draw([[1, 2, 3], [1, 2, 4]]);
    const parts = ["wait", "run", "answer"].map((kind, place) => ({ kind, from: place, to: place + 1 }));
    lanes.draw([{ name: "run", title: "", slices: [{ from: 0, to: 3, parts, text: "" }] }], [0, 3]);
    const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const probe = document.body.appendChild(document.createElement("i"));
    const rgb = (name) => {
        probe.style.color = `var(${name})`;
        return getComputedStyle(probe).color.match(/\\d+/g).join();
    };
    const lacking = (node, ...names) => {
        const found = new Set();
        for (const canvas of node.querySelectorAll("canvas")) {
            Object.assign(copy.canvas, { width: canvas.width, height: canvas.height });
            copy.drawImage(canvas, 0, 0);
            const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
            for (let at = 0; at < data.length; at += 4) found.add(data.slice(at, at + 3).join());
        }
        return names.filter((name) => !found.has(rgb(name)));
    };
    window.lacking = () => [
        ...lacking(chart.node, "--card", "--line", "--quiet"),
        ...lacking(lanes.node, "--line", "--quiet", "--wait", "--link", "--answer"),
    ];
})"""
"""Script that draws a chart and lanes, after which `lacking()` has the page's colours that they lack."""


def test_colours_follow_a_change_of_theme(server: Serve, page: Page) -> None:
    """Axes, dots and slices are drawn, which no style sheet reaches."""
    page.open(server.url)
    page.wait("document.querySelector('.badge') !== null")
    page.run(PAINTED)
    for dark in (False, True, False):
        page.resize(1600, 1000, dark=dark)
        page.wait("lacking().length === 0")
    assert page.errors == []


TOLD = "document.querySelector('.told').innerText"
POINT = """(() => {
    const lane = document.querySelector('canvas[aria-label^="trainer, units"]');
    for (let x = 0; x < lane.clientWidth && !(%s).startsWith("forward_backward"); x += 1) {
        const {left, top} = lane.getBoundingClientRect();
        lane.dispatchEvent(new PointerEvent("pointermove", {clientX: left + x, clientY: top + 3}));
    }
    return %s;
})()""" % (TOLD, TOLD)  # noqa: UP031  (braces of JavaScript)
"""Script that moves the pointer along the units until one of a pass is told."""
KEEP = "URL.createObjectURL = (blob) => { window.saved = blob; return '#/trace'; }"
SAVE = "[...document.querySelectorAll('button')].find((each) => each.innerText === 'Save trace').click()"
LANES = "[...document.querySelectorAll('.lane')].map((each) => each.innerText)"


def test_the_trace_is_looked_at_and_saved(server: Serve, client: Client, page: Page) -> None:
    with loop(client) as training:
        page.open(f"{server.url}/#/runs/{training.model_id}")
        page.wait(f"{STEPS} > 1")
        page.run("location.hash = '#/trace'")
        lanes = page.wait(f"{LANES}.length && {LANES}")
    assert {"trainer, units", "trainer, rank 0", "weights to the samplers"} <= set(lanes)
    titles = page.run("[...document.querySelectorAll('.lane')].map((each) => each.title)")
    assert {training.model_id, training.model_id.partition(":")[0]} <= set(titles)
    assert re.match(r"forward_backward: .*, requests 1, tokens \d+, yours 1", page.run(POINT))
    page.run(KEEP)
    page.run(SAVE)
    saved = json.loads(page.run("saved.text()"))
    assert {each["ph"] for each in saved["traceEvents"]} == {"M", "X", "b", "e", "C"}
    assert page.errors == []


def test_a_run_that_failed_says_why_and_a_live_one_can_be_ended(server: Serve, page: Page) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-local") as service:
        live = service.create_lora_training_client(base_model="tiny", rank=8).result().model_id
        session = live.partition(":")[0]
        creation = {
            "session_id": session,
            "model_seq_id": 7,
            "base_model": "tiny",
            "lora_config": {"rank": 10**6},
        }
        Client(server.url, service).post("create_model", creation).raise_for_status()
        page.open(f"{server.url}/#/runs/{session}:train:7")
        page.wait("document.body.innerText.includes('lora_config.rank')")
        assert page.run("document.querySelector('.danger').hidden")
        page.run(f"location.hash = '#/runs/{live}'")
        page.wait("document.querySelector('.danger')?.hidden === false")
        page.run("document.querySelector('.danger').click()")
        page.wait("document.querySelector('dialog button') !== null")
        page.run("document.querySelector('dialog button').click()")
        page.wait("document.querySelector('section[aria-label=\"Run\"]').innerText.includes('released')")
    assert page.errors == []


def test_every_view_fits_a_telephone_and_every_control_has_a_name(server: Serve, page: Page) -> None:
    name, runs = "on a telephone", []
    with tinker.ServiceClient(base_url=server.url, api_key="tml-local", display_name=name) as service:
        for _ in range(2):
            training = service.create_lora_training_client(base_model="tiny", rank=8).result()
            train(training, random_tokens(6, seed=1))
            runs.append(training.model_id)
    asked = httpx.get(f"{server.url}/api/v1/console/requests", params={"run": runs[0]}).json()
    datum_of = asked["requests"][0]["request_id"]
    page.resize(390, 844)
    page.open(server.url)
    views = page.wait("[...document.querySelectorAll('nav a')].map((link) => link.hash)")
    shown = dict.fromkeys(views, "document.querySelector('nav a[aria-current]')?.hash === location.hash")
    shown[f"#/runs/{runs[0]}"] = f"document.querySelector('h1')?.innerText === '{name}'"
    shown[f"#/runs/{','.join(runs)}"] = "document.querySelector('h1')?.innerText === '2 runs compared'"
    shown[f"#/tokens/{datum_of}"] = "document.querySelector('.tokens') !== null"
    for view, condition in shown.items():
        page.run(f"location.hash = '{view}'")
        page.wait(condition)
        assert page.run("document.documentElement.scrollWidth") <= 390, view
        assert page.run(NAMELESS) == 0, view
    page.run("location.hash = '#/runs'")
    page.wait("document.querySelector('input[type=search]') !== null")
    page.run("document.querySelector('input[type=search]').focus()")
    page.type(runs[0])
    page.wait(f"{ROWS}.join() === '{name}'")
    assert page.run("getComputedStyle(document.querySelector('tbody tr')).display") == "grid"
    assert page.errors == []


def test_the_keyboard_reaches_the_views(server: Serve, page: Page) -> None:
    page.open(server.url)
    page.wait("document.querySelector('nav a') !== null")
    for _ in range(10):
        page.press("Tab")
        if page.run("document.activeElement.hash === '#/runs'"):
            break
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press("Enter")
    page.wait("document.querySelector('h1')?.innerText === 'Runs'")


def test_a_hidden_page_asks_for_nothing(server: Serve, page: Page) -> None:
    page.open(server.url)
    page.wait("document.querySelector('.badge')?.innerText === 'ready'")
    page.run("Object.defineProperty(document, 'hidden', {get: () => true})")
    page.run("new Promise((done) => setTimeout(done, 2500))")
    page.run("performance.clearResourceTimings()")
    page.run("new Promise((done) => setTimeout(done, 2500))")
    assert page.run("performance.getEntriesByType('resource').length") == 0


@contextmanager
def api_with_keys(home: Path, **changes: str) -> Iterator[tuple[str, dict[str, str], dict[str, str]]]:
    """An API's URL, and of two owners the runs and keys; root has an admin key."""
    with launched_on(home, _two_owners, **changes) as (api, (runs, keys)):
        yield api.url, runs, keys


def test_on_gpus_their_memory_stands_beside_the_hosts_and_that_of_processes(
    chromium: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncase $1 in *gpu=*) echo 700, 81559 ;; *) echo {os.getpid()}, 600 ;; esac\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with api_with_keys(tmp_path / "home", device="cuda") as (url, _, keys), chromium.page() as page:
        directories = Directories(settings_for(tmp_path / "home"))
        directories.run_dir.mkdir(parents=True, exist_ok=True)
        write_pid_file(directories.pid_file, identities([psutil.Process()]))
        page.open(url)
        enter(page, keys["root"])
        page.wait("document.body.innerText.includes('; GPU 0: 734 MB of 85.5 GB in use')")
        page.wait("[...document.querySelectorAll('td')].some((each) => each.innerText === '629 MB')")
        assert "GPU memory" in page.text()


def enter(page: Page, key: str) -> None:
    page.wait("document.activeElement.id === 'key'")
    page.type(key)
    page.press("Enter")


def test_an_admin_sees_how_long_ago_a_key_was_used(chromium: Browser, tmp_path: Path) -> None:
    with api_with_keys(tmp_path / "home") as (url, _, keys), chromium.page() as page:
        page.open(f"{url}/#/admin")
        enter(page, keys["root"])
        used = page.wait("document.querySelector('td time')?.innerText")
        assert used == "3 h ago"
        assert re.search(r"20\d\d, \d\d:\d\d:\d\d \S+$", page.run("document.querySelector('td time').title"))


ADOPT = "[...document.querySelectorAll('td button')].find((each) => each.innerText === 'Adopt')"


def test_an_admin_gives_the_work_of_a_key_that_has_ended_to_another(
    chromium: Browser, tmp_path: Path
) -> None:
    with api_with_keys(tmp_path / "home") as (url, runs, keys), chromium.page() as page:
        root = {"X-API-Key": keys["root"]}
        httpx.delete(f"{url}/api/v1/console/admin/keys/1", headers=root).raise_for_status()
        page.open(f"{url}/#/admin")
        enter(page, keys["root"])
        page.wait(f"{ADOPT} !== undefined")
        page.run(f"{ADOPT}.click()")
        page.wait("document.querySelector('dialog option')?.innerText === 'key 1, alice'")
        page.run("document.querySelector('dialog button').click()")
        page.wait("document.body.innerText.includes('bob has adopted 1 session.')")
        theirs = httpx.get(f"{url}/api/v1/console/runs", headers={"X-API-Key": keys["bob"]}).json()
        assert {run["run_id"] for run in theirs["runs"]} == set(runs.values())
        assert [error for error in page.errors if "401" not in error] == [], "it had asked for a key"


def test_a_key_is_asked_for_once_and_shows_its_own_runs_only(chromium: Browser, tmp_path: Path) -> None:
    with api_with_keys(tmp_path / "home") as (url, runs, keys), chromium.page() as page:
        page.open(f"{url}/#/runs")
        enter(page, "tml-wrong")
        page.wait("document.body.innerText.includes('unknown or revoked')")
        enter(page, keys["alice"])
        page.wait("document.querySelector('td.run a') !== null")
        assert runs["alice"] in page.text()
        assert runs["bob"] not in page.text()
        assert "Admin" not in page.text()
        assert keys["alice"] not in page.run("location.href")
        page.reload()
        page.wait("document.querySelector('td.run a') !== null")
        assert page.run("localStorage.length") == 0
        page.open("about:blank")
        page.open(f"{url}/#/runs/%")
        page.wait("document.body.innerText.includes('no training run %')")
        page.open(f"{url}/docs")
        page.wait("document.querySelectorAll('.opblock-tag').length > 5")
        page.run("document.querySelector('.authorize').click()")
        page.wait("document.querySelector('.auth-container input') !== null")
        refused = [error for error in page.errors if "Content Security" in error or "Uncaught" in error]
        assert refused == []


async def _two_owners(store: Store) -> tuple[dict[str, str], dict[str, str]]:
    await write_facts(store)
    await store.write(lambda conn: server_state.put(conn, "engine", {"state": "ready", "detail": ""}))
    runs, keys = {}, {}
    for name in ("alice", "bob"):
        keys[name] = await store.write(lambda conn, name=name: api_keys.create(conn, name))
        runs[name] = (await create(store, await new_session(store))).model_id
        await store.write(lambda conn, name=name: api_keys.adopt(conn, name, api_keys.NO_KEY))
    keys["root"] = await store.write(lambda conn: api_keys.create(conn, "root", admin=True))
    earlier, rows = store.now() - 3 * 3600, await store.fetch(api_keys.list_keys)
    await store.write(lambda conn: api_keys.note_use(conn, {rows[0].id: earlier}))
    return runs, keys
