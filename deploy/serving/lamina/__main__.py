"""`python -m lamina …` is `transformers …` with Lamina's classes registered: `python -m lamina serve` and `chat`
load checkpoints without `--trust-remote-code`.
"""

from transformers.cli.transformers import main

import lamina

lamina.register()
main()
