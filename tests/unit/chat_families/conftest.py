from family_directories import folder  # noqa: F401 - a fixture
