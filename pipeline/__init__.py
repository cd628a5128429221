"""What is computed, in which order. `python -m pipeline.run MANIFEST` is the job."""

from manifests.packages import check_packages, find_serving_package
from manifests.processor import settle_processor

PROJECT = "Lamina"
find_serving_package()
check_packages()
settle_processor()
