# Raw data -> prepared domain (contract 1).


rule prepare:
    input:
        src=lambda w: plan.code("prepare", domain=w.domain),
        card=lambda w: plan.card(w.domain),
    output:
        expand("data/prepared/{{domain}}/{name}", name=PREPARED_FILES),
    log:
        "logs/prepare/{domain}.log",
    resources:
        mem_mb=lambda w, attempt: 2000 * attempt,
        runtime=lambda w, attempt: 240 * attempt,
    params:
        block=lambda w: plan.prepare_params(w.domain),
        root=lambda w, output: plan.root(w.domain),  # takes `output` to stay out of what triggers a re-run: a path is no content
        out="data/prepared/{domain}",
        problems="logs/prepare/{domain}.problems.csv",
    shell:
        "anomed prepare {wildcards.domain:q} --params {params.block:q} --root={params.root:q} --out {params.out:q}"
        " --problems {params.problems:q} > {log:q} 2>&1"
