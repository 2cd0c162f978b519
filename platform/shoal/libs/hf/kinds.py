"""The kinds of models of Hugging Face, for those that list them before transformers is loaded."""

TASKS = "shoal.libs.hf.tasks"
KINDS = {  # of models: the Task that trains each
    "causal_lm": f"{TASKS}:CausalLM",
    "sequence_classification": f"{TASKS}:SequenceClassification",
    "token_classification": f"{TASKS}:TokenClassification",
    "image_classification": f"{TASKS}:ImageClassification",
}
