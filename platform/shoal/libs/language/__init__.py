"""Text from language models, with the version of the weights on each token: `engine` needs neither Ray nor HTTP."""
