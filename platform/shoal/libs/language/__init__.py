"""Text from language models, with the version of the weights on every token: `engine` generates, without Ray or HTTP."""
