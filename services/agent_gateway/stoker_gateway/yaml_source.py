"""The text of a spec: what it says, where each field stands, and what it says twice. The only importer of yaml here."""

from __future__ import annotations

import yaml

from stoker_proto import FieldError


class NotYaml(ValueError):
    """The text cannot be read; `line` is where reading stopped, when that is known."""

    def __init__(self, told: str, line: int | None) -> None:
        super().__init__(told)
        self.line = line


class YamlSource:
    """A YAML document. Raises NotYaml."""

    def __init__(self, text: str) -> None:
        try:
            loader = yaml.SafeLoader(text)
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
        """Keys of the top two levels that stand there more than once; YAML would silently take the last."""
        if not isinstance(self._root, yaml.MappingNode):
            return []
        inner = [(k.value, v) for k, v in self._root.value if isinstance(v, yaml.MappingNode)]
        found = _twice("", self._root)
        for name, node in inner:
            found += _twice(f"/{name}", node)
        return found


def _twice(above: str, node: yaml.MappingNode) -> list[FieldError]:
    first: dict[str, int] = {}
    found = []
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.value in first and key.tag != "tag:yaml.org,2002:merge":
            told = f"{key.value!r} stands here again, after line {first[key.value]}; keep one"
            found.append(FieldError(pointer=f"{above}/{key.value}", code="invalid", message=told, line=line))
        first.setdefault(str(key.value), line)
    return found
