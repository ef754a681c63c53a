"""Property tests take the time they need on a busy machine, and print how to repeat a failure."""

from hypothesis import settings

settings.register_profile("tidegate", deadline=None, print_blob=True)
settings.load_profile("tidegate")
