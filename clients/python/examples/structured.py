"""Answers that match: one of several texts, a regular expression, a JSON schema.

python examples/structured.py [--connect ENDPOINT] [SENTENCE]
"""

from __future__ import annotations

import argparse
import json

from kvd_client import Client
from kvd_client.errors import BadRequest

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connect", metavar="ENDPOINT")
    parser.add_argument("sentence", nargs="?", default="What a lovely day by the sea!")
    arguments = parser.parse_args()

    with Client(arguments.connect) as client:
        client.wait_ready(timeout_s=120)

        mood = client.generate(f"{arguments.sentence}\nThe mood of this is ", choice=["glad", "sad", "angry"], temperature=0)
        print(f"mood: {mood.text}")

        date = client.generate("The moon landing was on ", regex=r"(19|20)\d{2}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", temperature=0)
        print(f"date: {date.text}")

        # Bounds in the schema, and room in max_tokens: an answer that is cut off is only the beginning of a match.
        person = client.chat([{"role": "user", "content": "Describe a person as JSON."}], json_schema=PERSON, max_tokens=200)
        if person.finish_reason == "stop":
            print(f"person: {json.loads(person.text)}")

        try:
            client.generate("x", json_schema={"type": "objekt"})
        except BadRequest as error:
            print(f"refused: {error}")


if __name__ == "__main__":
    main()
