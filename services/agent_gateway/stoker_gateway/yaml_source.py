"""The text of a spec: what it says, where each field stands, and what it says twice. The only importer of yaml here."""

from __future__ import annotations

import yaml

from stoker_proto import FieldError


class NotYaml(ValueError):
    """The text cannot be read; `line` is where reading stopped, when that is known."""

    def __init__(self, told: str, line: int | None) -> None:
        super().__init__(told)
        self.line = line


class _Loader(yaml.SafeLoader):
    """YAML's safe part, in which 18:00 is a text as in YAML 1.2, and no number to the base of sixty."""

    def _number(self, node: yaml.ScalarNode) -> object:
        if ":" in node.value:
            return node.value
        whole = node.tag.endswith(":int")
        return self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader._number)


class YamlSource:
    """A YAML document. Raises NotYaml."""

    def __init__(self, text: str) -> None:
        try:
            loader = _Loader(text)
            self._root = loader.get_single_node()
            self.value: object = loader.construct_document(self._root) if self._root else None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            told = str(getattr(error, "problem", None) or error)
            raise NotYaml(told, mark.line + 1 if mark else None) from error
        except (ValueError, RecursionError) as error:  # an impossible date, or thousands of brackets
            raise NotYaml(str(error), None) from error

    def line(self, pointer: str) -> int | None:
        """The line of the field, or of the nearest thing above it."""
        node, line = self._root, 1
        for part in pointer.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, yaml.MappingNode):
                pair = next(((k, v) for k, v in node.value if k.value == name), None)
                if pair is None:
                    break
                line, node = pair[0].start_mark.line + 1, pair[1]
            elif isinstance(node, yaml.SequenceNode) and name.isdecimal() and int(name) < len(node.value):
                node = node.value[int(name)]
                line = node.start_mark.line + 1
            else:
                break
        return line

    def written_twice(self) -> list[FieldError]:
        """Keys that stand more than once in one mapping; YAML would silently take the last."""
        found: list[FieldError] = []
        seen: set[int] = set()
        waiting: list[tuple[str, yaml.Node]] = [("", self._root)] if self._root else []
        while waiting:
            above, node = waiting.pop()
            if id(node) in seen:  # an anchor's content stands in one place only
                continue
            seen.add(id(node))
            if isinstance(node, yaml.MappingNode):
                found += _twice(above, node)
                waiting += [(f"{above}/{_escaped(key.value)}", value) for key, value in node.value]
            elif isinstance(node, yaml.SequenceNode):
                waiting += [(f"{above}/{at}", value) for at, value in enumerate(node.value)]
        return found


def _escaped(name: object) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")


def _twice(above: str, node: yaml.MappingNode) -> list[FieldError]:
    first: dict[str, int] = {}
    found = []
    for key, _ in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in first and key.tag != "tag:yaml.org,2002:merge":
            told = f"{name!r} stands here again, after line {first[name]}; keep one"
            found.append(FieldError(pointer=f"{above}/{_escaped(name)}", code="invalid", message=told, line=line))
        first.setdefault(name, line)
    return found
