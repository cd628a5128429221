"""Run `transformers …` with Lamina's classes registered: `python -m lamina serve` and `chat` load checkpoints without
`--trust-remote-code`.
"""

import transformers.cli.serving.model_manager
import transformers.processing_utils  # noqa: F401 - replaces the module `transformers`: import it before setting classes there
from transformers.cli.transformers import main

import lamina

lamina.register()
main()
