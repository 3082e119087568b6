"""List the model types that `make models` found exact; `python -m docs.update` writes this file."""

EXACT = (
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "bart", "beam", "bert", "bert-generation", "biogpt", "bitnet",
    "blenderbot", "blenderbot-small", "camembert", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "ctrl",
    "cwm", "data2vec-text", "dbrx", "deepseek_v2", "deepseek_v3", "diffllama", "dots1", "electra", "emu3_text_model",
    "ernie", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "flint", "gemma", "gemma2",
    "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite",
    "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa",
    "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "jetmoe",
    "kolibri1", "laguna", "llama", "llama4_text", "longcat_flash", "marian", "mbart", "mellum", "mimo_v2_flash",
    "minicpm3", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral",
    "mllama_text_model", "moshi", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "pegasus",
    "persimmon", "phi", "phi3", "phi4_multimodal", "phimoe", "plbart", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "roberta", "roberta-prelayernorm", "roc_bert", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2",
    "vaultgemma", "whisper", "xlm-roberta", "xlm-roberta-xl", "xmod", "youtu",
)  # fmt: skip
