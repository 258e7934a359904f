"""A job with a mistake of its own."""


def load(path: str) -> None:
    raise ValueError(f"no such dataset: {path}")


load("docs/v3")
