"""The report in a real browser: it draws without complaint or network, answers pointer, keys and buttons, and fits a
phone. Without a Chromium on PATH these tests are skipped.
"""

import os
from pathlib import Path

import browser as browsers
import pytest
from made_up_run import row, sample, write_run

from sparrow_jax.report import write_report

CHROMIUM = browsers.find()

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason=f'needs one of {", ".join(browsers.NAMES)} on PATH (apt-get install chromium)'
)

SOUND = '[...document.querySelectorAll("svg path")].every((path) => !/NaN|Infinity/.test(path.outerHTML))'
LINES = 'document.querySelectorAll("figure svg[role=img] path").length'


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    with browsers.Browser(CHROMIUM, tmp_path_factory.mktemp('profile')) as browser:
        yield browser


@pytest.fixture(scope='module')
def folders(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp('runs')
    return [write_run(folder / 'first'), write_run(folder / 'second', steps=25)]


@pytest.fixture(scope='module')
def one(folders) -> Path:
    return write_report(folders[:1])


@pytest.fixture(scope='module')
def two(folders) -> Path:
    return write_report(folders, folders[0] / 'two.html')


def shown(browser, selector: str) -> list[str]:
    """Texts of what matches and is seen."""
    return browser.value(
        f'[...document.querySelectorAll({selector!r})].filter((n) => n.checkVisibility()).map((n) => n.textContent)'
    )


def choose(browser, selector: str, value: object, place: int = 0) -> None:
    """Sets the control that matches (of several, the one at this place), as a person would."""
    browser.value(
        f"""(() => {{
            const control = document.querySelectorAll({selector!r})[{place}];
            control.value = {str(value)!r};
            for (const kind of ['input', 'change']) control.dispatchEvent(new Event(kind));
        }})()"""
    )
    browser.settle()


def labels(browser, selector: str = 'figure') -> list[str]:
    """What the charts within say to who cannot see them."""
    charts = f'document.querySelectorAll("{selector} svg[role=img]")'
    return browser.value(f'[...{charts}].map((svg) => svg.getAttribute("aria-label"))')


def middle(browser, figure: str) -> tuple[float, float]:
    """Of the chart with this title, brought into view: in pixels of the window."""
    return tuple(
        browser.value(
            f"""(() => {{
                const title = [...document.querySelectorAll('figure h3')].find((h) => h.textContent === {figure!r});
                const svg = title.closest('figure').querySelector('svg[role=img]');
                svg.scrollIntoView({{ block: 'center' }});
                const box = svg.getBoundingClientRect();
                return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
    )


@pytest.mark.parametrize('dark', [False, True])
@pytest.mark.parametrize('width', [390, 1280])
@pytest.mark.parametrize('name', ['one', 'two'])
def test_it_draws_without_complaint_network_or_overflow(name, width, dark, browser, request, tmp_path):
    file = request.getfixturevalue(name)
    browser.open(file, width=width, dark=dark)
    # SPARROW_JAX_SCREENSHOTS names a folder to keep the pictures in, for a person to look at.
    pictures = Path(os.environ.get('SPARROW_JAX_SCREENSHOTS', tmp_path))
    png = browser.screenshot(pictures / f'{name}_{width}_{"dark" if dark else "light"}.png')
    assert len(png) > 50_000  # an empty page has a tenth of that
    assert browser.complaints() == []
    assert [url for url in browser.requests() if not url.startswith(('file:', 'data:'))] == []
    assert browser.value('document.documentElement.scrollWidth') <= width
    titles = shown(browser, 'figure h3')
    for title in (
        *('Reward and held-out accuracy', 'Response length', 'p05 by step', 'p05 by length', 'The tail of alpha'),
        *('KV cache read', 'Speed'),
    ):
        assert title in titles
    each = ['first', 'second'] if name == 'two' else ['']
    for run in each:
        assert {f'{part}: {run}' if run else part for part in ('Budgets by length', 'Time of a step')} <= set(titles)
    empty = 'figure:not(:has(svg[role=img] path))'
    assert shown(browser, empty) == []
    assert browser.value(SOUND)
    # Light text on dark ground or the other way round.
    channel = lambda what: browser.value(f'Number(getComputedStyle(document.body).{what}.match(/\\d+/)[0])')
    assert (channel('color') > 128, channel('backgroundColor') > 128) == (dark, not dark)


def test_a_pointer_reads_the_values(browser, one):
    browser.open(one)
    browser.move(*middle(browser, 'Reward and held-out accuracy'))
    [text] = shown(browser, '#tip')
    step, reward = text.removeprefix('step ').split('reward in training')
    assert 17 <= int(step) <= 23  # of 40
    assert float(reward) == pytest.approx(0.2 + 0.6 * int(step) / 40)
    browser.move(5, 5)
    assert shown(browser, '#tip') == []


def test_arrow_keys_read_the_values(browser, one):
    browser.open(one)
    place = shown(browser, 'figure h3').index('KV cache read')
    browser.value(f'document.querySelectorAll("figure svg[role=img]")[{place}].focus()')
    browser.press('ArrowLeft')
    assert shown(browser, '#tip')[0].startswith('step 40')
    browser.press('ArrowLeft')
    [text] = shown(browser, '#tip')
    assert text.startswith('step 39')
    assert '25%' in text
    browser.press('Escape')
    assert shown(browser, '#tip') == []


def test_every_chart_is_told_in_words(browser, one):
    browser.open(one)
    told = labels(browser)
    assert told[0].startswith(
        'Reward and held-out accuracy. reward in training: from 0.215 to 0.8, least 0.215, greatest 0.8; held-out'
    )
    assert all(len(label) > 40 for label in told)


def test_a_run_can_be_hidden(browser, two):
    browser.open(two)
    before = browser.value(LINES)
    browser.value('document.querySelectorAll("button.run")[1].click()')
    assert browser.value('document.querySelectorAll("button.run")[1].getAttribute("aria-pressed")') == 'false'
    assert browser.value(LINES) < before
    assert not any('second' in text for text in shown(browser, '.keys li'))
    browser.value('document.querySelectorAll("button.run")[0].click()')
    assert browser.value(LINES) == 0
    for button in (0, 1):
        browser.value(f'document.querySelectorAll("button.run")[{button}].click()')
    assert browser.value(LINES) == before
    assert browser.complaints() == []


def test_light_and_dark_by_hand_and_smoothing(browser, one):
    browser.open(one)
    ground = lambda: browser.value('getComputedStyle(document.body).backgroundColor')
    light = ground()
    browser.value('document.getElementById("theme").click()')
    assert ground() != light
    browser.value('document.getElementById("theme").click()')
    assert ground() == light
    before = browser.value(LINES)
    choose(browser, '#smoothing', 0.5)
    assert browser.value(LINES) > before
    assert browser.complaints() == []


def test_answers_are_chosen_by_step_and_by_whether_they_are_right(browser, tmp_path):
    samples = [sample(step, reward=float(i)) for step in (1, 2) for i in (0, 1)]
    browser.open(write_report([write_run(tmp_path / 'run', steps=2, samples=samples)]))
    assert [text[:8] for text in shown(browser, '.sample')] == ['reward 0', 'reward 1']
    assert all('At step 2 it is' in text for text in shown(browser, '.sample'))
    choose(browser, '#filters select', 1, place=0)
    assert all('At step 1 it is' in text for text in shown(browser, '.sample'))
    choose(browser, '#filters select', 'wrong', place=1)
    assert [text[:8] for text in shown(browser, '.sample')] == ['reward 0']


def test_any_number_can_be_drawn(browser, one):
    browser.open(one)
    choose(browser, '#any select', 'perf/throughput')
    assert labels(browser, '#any') == ['perf/throughput. value: from 9,000 to 9,000, least 9,000, greatest 9,000.']


def test_texts_of_a_model_stay_texts(browser, tmp_path):
    evil = '</script><script>window.harmed = 1</script><img src=x onerror="window.harmed = 2"><b id=bold>bold</b>'
    rows = [row(1, **{evil: 1.0}), row(2, **{evil: 2.0})]
    samples = [sample(1, prompt=evil, completion=evil, answer=evil, finish_reason=evil)]
    browser.open(write_report([write_run(tmp_path / 'run <b id=bold>', rows=rows, samples=samples)]))
    assert evil in shown(browser, '.sample pre')[0]
    assert (
        browser.value('[window.harmed, document.getElementById("bold"), document.querySelector("img")]') == [None] * 3
    )
    assert browser.complaints() == []  # nothing was even tried and refused


def test_without_scripts_headline_and_table_remain(browser, one):
    browser.ask('Emulation.setScriptExecutionDisabled', value=True)
    try:
        browser.ask('Page.navigate', url=one.absolute().as_uri() + '?noscript')
        # Scripts of the page are off, questions to it are not.
        for _ in range(500):
            if browser.value('document.readyState') == 'complete' and browser.value('location.search') == '?noscript':
                break
        assert '0.800 ± 0.020' in ' '.join(shown(browser, '.card'))
        assert browser.value('document.querySelectorAll("figure").length') == 0
        assert 'The charts below need scripts' in ' '.join(shown(browser, 'noscript'))
        assert browser.value('document.querySelectorAll("tbody tr").length') > 20
    finally:
        browser.ask('Emulation.setScriptExecutionDisabled', value=False)


def test_a_long_run_and_a_run_of_one_step(browser, tmp_path):
    for name, rows in (('long', [row(step) for step in range(1, 1301)]), ('short', [row(1)])):
        browser.open(write_report([write_run(tmp_path / name, rows=rows)]))
        assert browser.complaints() == []
        assert browser.value(SOUND)
    browser.open(tmp_path / 'long/report.html')
    browser.move(*middle(browser, 'Entropy'))
    assert shown(browser, '#tip')[0].startswith('steps ')
