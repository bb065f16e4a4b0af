"""Start the template of all ranks while pytest collects."""

from meshfit.launch.warm import warm


def pytest_configure() -> None:
    warm("_pytest.assertion.rewrite")  # what pytest's rewritten asserts call, in ranks too
