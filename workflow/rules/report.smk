# Scores -> tables (contract 5) and the page.


rule table:
    input:
        src=plan.code("table"),
        scores=[run.path("scores", ".json") for run in plan.runs],
        runs=[run.path("runs") for run in plan.runs],
        models=[run.path("models") for run in plan.runs],
        cards=expand("data/prepared/{domain}/card.json", domain=plan.domains),
    output:
        expand("results/{name}", name=TABLES),
    log:
        "logs/table.log",
    params:
        plan=plan.table_params(),
    shell:
        "anomed table --plan {params.plan:q} > {log:q} 2>&1"


rule report:
    input:
        src=plan.code("report"),
        template="src/anomed/report/template.html",
        tables=rules.table.output,
        runs=rules.table.input.runs,
        models=rules.table.input.models,
        data=[path for domain in plan.domains for path in plan.prepared(domain)],
    output:
        "results/report.html",
    log:
        "logs/report.log",
    params:
        plan=plan.table_params(),
    shell:
        "anomed report --plan {params.plan:q} > {log:q} 2>&1"
