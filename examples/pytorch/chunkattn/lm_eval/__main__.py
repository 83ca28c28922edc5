"""lm-eval's own command, which knows the model `chunkattn`."""

import sys

try:
    from lm_eval.__main__ import cli_evaluate
except ModuleNotFoundError as error:
    sys.exit(f"chunkattn.lm_eval: {error}: expected lm-evaluation-harness (pip install 'lm_eval[hf]')")

from . import ChunkAttnLM  # registers it

if __name__ == "__main__":
    cli_evaluate()
