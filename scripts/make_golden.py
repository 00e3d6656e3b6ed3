"""Writes tests/models/golden/*.npz: logits that transformers computes in float32, for the decoder's tests to be
compared with.

Needs PyTorch, which the project itself does not, so it runs in an environment of its own:

    python -m venv /tmp/golden && /tmp/golden/bin/pip install torch transformers gguf accelerate
    /tmp/golden/bin/python scripts/make_golden.py

The tiny models come from tests/models/golden_cases.py. SmolLM2 is read from weights/smollm2-135m (`make model`) by
transformers' own GGUF reader, so the tests also compare two independent dequantizations; without the file that one is
left as it is.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / 'tests' / 'models'))
import golden_cases  # noqa: E402

SMOLLM2 = ROOT / 'weights' / 'smollm2-135m' / 'SmolLM2-135M-Instruct.Q4_1.gguf'


def tiny_logits(config: dict) -> np.ndarray:
    """[2, 24, V] of the tiny model of one case, opened by transformers from a folder."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / 'config.json').write_text(json.dumps(config))
        save_file(golden_cases.weights(config), f'{folder}/model.safetensors', metadata={'format': 'pt'})
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation='eager', output_loading_info=True
        )
    # A tensor that transformers did not find would be random, and the golden values with it.
    if loading['missing_keys'] or loading['unexpected_keys']:
        raise SystemExit(f'the tiny checkpoint does not fit the model of transformers: {loading}')
    with torch.no_grad():
        return model(torch.from_numpy(golden_cases.tokens_BT())).logits.numpy()


def smollm2_logits() -> dict[str, np.ndarray]:
    """Prompt ids, a grid of logits, and each position's largest logit and its id."""
    folder, file = str(SMOLLM2.parent), SMOLLM2.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, attn_implementation='eager'
    )
    message = {'role': 'user', 'content': golden_cases.SMOLLM2_PROMPT}
    ids = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=True, return_dict=False)
    with torch.no_grad():
        logits_TV = model(torch.tensor([ids])).logits[0].numpy()
    grid = logits_TV[list(golden_cases.SMOLLM2_POSITIONS)][:, :: golden_cases.SMOLLM2_VOCAB_STRIDE]
    return {'ids': np.array(ids), 'grid': grid, 'max': logits_TV.max(-1), 'argmax': logits_TV.argmax(-1)}


def main() -> None:
    folder = ROOT / 'tests' / 'models' / 'golden'
    folder.mkdir(exist_ok=True)
    for name, config in golden_cases.CASES.items():
        np.savez_compressed(folder / f'{name}.npz', logits_BTV=tiny_logits(config), made_with=transformers.__version__)
    if SMOLLM2.exists():
        np.savez_compressed(folder / 'smollm2.npz', **smollm2_logits(), made_with=transformers.__version__)
    for file in sorted(folder.glob('*.npz')):
        print(f'{file.relative_to(ROOT)}: {file.stat().st_size} bytes')


if __name__ == '__main__':
    main()
