# Prepared domain -> model (contract 2) -> predictions (contract 3).


rule fit:
    input:
        src=lambda w: plan.code("fit", system=w.system),
        data=lambda w: plan.prepared(w.domain),
    output:
        directory("models/{domain}/{system}/{seed}"),
    log:
        "logs/fit/{domain}/{system}/{seed}.log",
    threads: lambda w: plan.torch_threads(w.system)
    resources:
        gpu=lambda w: plan.gpu(w.system),
        mem_mb=lambda w, attempt: plan.memory_mb(w.system) * attempt,
        runtime=lambda w, attempt: 240 * attempt,
    params:
        block=lambda w: plan.fit_params(w.system),
        device=lambda w, output: plan.params.run.device,
        data="data/prepared/{domain}",
    shell:
        "anomed fit {wildcards.system:q} --params {params.block:q} --seed {wildcards.seed} --data {params.data:q}"
        " --out {output:q} --device {params.device} > {log:q} 2>&1"


rule predict:
    input:
        src=lambda w: plan.code("predict", system=w.system),
        data=lambda w: plan.prepared(w.domain),
        model="models/{domain}/{system}/{seed}",
    output:
        directory("runs/{domain}/{system}/{seed}"),
    log:
        "logs/predict/{domain}/{system}/{seed}.log",
    threads: lambda w: plan.torch_threads(w.system)
    resources:
        gpu=lambda w: plan.gpu(w.system),
        mem_mb=lambda w, attempt: plan.memory_mb(w.system) * attempt,
        runtime=lambda w, attempt: 120 * attempt,
    params:
        device=lambda w, output: plan.params.run.device,
        data="data/prepared/{domain}",
    shell:
        "anomed predict --model {input.model:q} --data {params.data:q} --out {output:q} --device {params.device}"
        " > {log:q} 2>&1"
