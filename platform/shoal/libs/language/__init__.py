"""Text from language models, with the version of the weights on each token: `engine` needs neither Ray nor HTTP."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "language",
    verbs={"chat": ("shoal.libs.language.command:chat", "Talk with a language model, of this machine or an endpoint.")},
    names={"language": "shoal.libs.language"},
    extensions={
        "shoal.next_commands": {"language": "shoal.libs.language.command:suggest_commands"},
        "shoal.protocols": {"language": "shoal.libs.language.app:make_app"},
        "shoal.text_problems": {"language": "shoal.libs.language.served.prepared:find_problem"},
        "shoal.texts": {
            "check": "shoal.libs.language.local:check_version",
            "local": "shoal.libs.language.local:LocalTexts",
        },
    },
    heading="serve",
)
