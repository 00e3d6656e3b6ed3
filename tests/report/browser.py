"""A headless Chromium that tests ask questions of, through its debugging pipe: no driver, no port, no network.

Found on PATH under one of `NAMES` (`apt-get install chromium` brings the first).
"""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

NAMES = ('chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable', 'chrome')
LIMIT_S = 60  # for an answer

_FLAGS = (
    *('--headless', '--no-sandbox', '--disable-gpu', '--no-first-run', '--disable-extensions', '--hide-scrollbars'),
    *('--disable-background-networking', '--disable-component-update', '--disable-dev-shm-usage'),
)


def find() -> str | None:
    """The path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page; a context manager that ends the browser.

    Attributes:
        events: everything that the page told of, in order: requests, console messages, exceptions.
    """

    def __init__(self, program: str, profile: Path):
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # It reads descriptor 3 and writes to 4; the shell puts the pipes there whatever their numbers here are.
        arrange = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        flags = (*_FLAGS, '--remote-debugging-pipe', f'--user-data-dir={profile}', 'about:blank')
        self._process = subprocess.Popen(
            ['bash', '-c', arrange, 'bash', program, *flags],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = os.fdopen(ours_in, 'rb', buffering=0), os.fdopen(ours_out, 'wb', buffering=0)
        self._buffer, self._count, self._session = b'', 0, ''
        self.events: list[dict[str, Any]] = []
        target = self.ask('Target.createTarget', url='about:blank')['targetId']
        self._session = self.ask('Target.attachToTarget', targetId=target, flatten=True)['sessionId']
        for domain in ('Page', 'Runtime', 'Log', 'Network'):
            self.ask(f'{domain}.enable')

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._in.close()
        self._out.close()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the DevTools protocol."""
        self._count += 1
        question: dict[str, Any] = {'id': self._count, 'method': method, 'params': parameters}
        if self._session:
            question['sessionId'] = self._session
        self._out.write(json.dumps(question).encode() + b'\0')
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            while b'\0' not in self._buffer:
                more = self._in.read(1 << 16)
                assert more, 'the browser has ended'
                self._buffer += more
            message, self._buffer = self._buffer.split(b'\0', 1)
            answer = json.loads(message)
            if answer.get('id') == self._count:
                assert 'error' not in answer, answer
                return answer['result']
            self.events.append(answer)
        raise AssertionError(f'no answer to {method} within {LIMIT_S} s')

    def value(self, expression: str) -> Any:
        """What JavaScript makes of an expression in the page; promises are waited for."""
        result = self.ask('Runtime.evaluate', expression=expression, returnByValue=True, awaitPromise=True)
        assert 'exceptionDetails' not in result, result
        return result['result'].get('value')

    def open(self, file: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens a file and waits until it has drawn itself; forgets what was told before."""
        self.events.clear()
        self.ask(
            'Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {'name': 'prefers-color-scheme', 'value': 'dark' if dark else 'light'}
        self.ask('Emulation.setEmulatedMedia', features=[scheme])
        self.ask('Page.navigate', url=file.absolute().as_uri())
        end = time.monotonic() + LIMIT_S
        while self.value('document.readyState + location.protocol') != 'completefile:':
            assert time.monotonic() < end, f'{file} did not load'
            time.sleep(0.02)
        self.settle()

    def settle(self) -> None:
        """Waits until the next two frames are drawn."""
        self.value('new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))')

    def move(self, x: float, y: float) -> None:
        """Moves the mouse, in pixels of the window."""
        self.ask('Input.dispatchMouseEvent', type='mouseMoved', x=x, y=y)
        self.settle()

    def press(self, key: str) -> None:
        for kind in ('keyDown', 'keyUp'):
            self.ask('Input.dispatchKeyEvent', type=kind, key=key, code=key)
        self.settle()

    def complaints(self) -> list[str]:
        """Errors, warnings and console messages since the page was opened."""
        self.settle()
        kinds = {
            'Runtime.consoleAPICalled': 'args',
            'Runtime.exceptionThrown': 'exceptionDetails',
            'Log.entryAdded': 'entry',
        }
        return [str(e['params'][kinds[e['method']]]) for e in self.events if e.get('method') in kinds]

    def requests(self) -> list[str]:
        """Addresses that were asked for since the page was opened."""
        return [e['params']['request']['url'] for e in self.events if e.get('method') == 'Network.requestWillBeSent']

    def screenshot(self, file: Path, *, whole: bool = True) -> bytes:
        """PNG of the whole page or of what the window shows, written to a file."""
        png = base64.b64decode(self.ask('Page.captureScreenshot', captureBeyondViewport=whole)['data'])
        file.write_bytes(png)
        return png
