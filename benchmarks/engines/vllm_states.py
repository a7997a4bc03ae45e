"""Capture a few prompts through vLLM's own hidden-states connector; run by the interpreter of a vLLM environment.

    VLLM_PYTHON benchmarks/engines/vllm_states.py MODEL PROMPTS.json OUT.safetensors --layers 2 4 5

PROMPTS.json is a list of lists of token ids; OUT gets `<prompt>` -> [S, L, H] in the order of the layers.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

WRITTEN_WITHIN_S = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", required=True)
    options = parser.parse_args()

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # for its processes: the connector lies beside this file
    from safetensors.torch import load_file, save_file
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            model=options.model,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=2,
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": options.layers}},
            },
            kv_transfer_config={
                "kv_connector": "HostHiddenStatesConnector",
                "kv_connector_module_path": "vllm_connector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": folder},
            },
        )
        prompts = [{"prompt_token_ids": ids} for ids in json.loads(options.prompts.read_text())]
        found = {}
        for number, answer in enumerate(llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0))):
            path = Path(answer.kv_transfer_params["hidden_states_path"])
            began_s = time.monotonic()
            while not path.exists() and time.monotonic() - began_s < WRITTEN_WITHIN_S:
                time.sleep(0.1)
            time.sleep(0.2)  # it is written by another thread, and renamed by nobody
            saved = load_file(path)
            found[str(number)] = saved["hidden_states"].float().contiguous()  # numpy knows no bfloat16
        save_file(found, options.out)


if __name__ == "__main__":
    main()
