"""List the types that `make models` found exact, by their layers."""

_LAYERS = {
    "": """
apertus arcee aria_text axk1 bert bert-generation bitnet cohere ctrl dbrx deepseek_v2 deepseek_v3 diffllama electra
emu3_text_model ernie ernie4_5 ernie4_5_moe flex_olmo fuyu gemma glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode
gpt_neox granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe llama
llava longcat_flash minicpm3 minimax_m2 ministral3 mistral mixtral mllama_text_model moshi nanochat nemotron olmo olmo2
olmoe persimmon phi phi3 phi4_multimodal phimoe qwen3_moe qwen3_vl qwen3_vl_moe roc_bert seed_oss solar_open stablelm
starcoder2 youtu
""",
    "chunked_attention full_attention": """
llama4_text
""",
    "conv full_attention": """
lfm2 lfm2_moe
""",
    "conv full_attention sliding_attention": """
lfm3
""",
    "full_attention": """
cohere_compass_text got_ocr2 minimax_m3_vl_text qwen2_5_vl qwen2_vl
""",
    "full_attention linear_attention": """
bailing_hybrid bamba granitemoehybrid jamba kimi_linear olmo_hybrid qwen3_5 qwen3_5_moe_text qwen3_5_text qwen3_next
""",
    "full_attention linear_attention mlp moe": """
nemotron_h
""",
    "full_attention sliding_attention": """
afmoe beam cohere2 cohere2_moe cwm dots1 exaone4 exaone_moe flint gemma2 gemma3 gemma3_text gemma3n_text gemma4
gemma4_text gemma4_unified_text gpt_oss granite_swa granitemoe_swa kolibri1 laguna mellum mimo_v2_flash ministral olmo3
qwen2 qwen2_moe qwen3 smollm3 vaultgemma
""",
    "hybrid": """
falcon_h1
""",
    "hybrid linear_attention": """
zamba zamba2
""",
    "linear_attention": """
falcon_mamba mamba mamba2
""",
}

TRIED = {kind: {*layers.split()} for layers, kinds in _LAYERS.items() for kind in kinds.split()}
