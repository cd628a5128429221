"""`python -m lamina …` is `transformers …` with Lamina's classes registered: `python -m lamina serve` and `chat`
load checkpoints without `--trust-remote-code`.
"""

import transformers.cli.serving.model_manager
import transformers.processing_utils  # noqa: F401 - it replaces the module `transformers`: before classes are set there
from transformers.cli.transformers import main

import lamina

lamina.register()
main()
