import os, sys, json, time, tempfile, logging
from pathlib import Path
sys.path.append(str(Path(__file__).parents[1]))
from soak_job import Forker, Job
from soak_network import open_network
from soak_oracle import Oracle, invalid, longest_stall_s
from soak_plan import plan_one
t0=time.monotonic()
os.environ['OMP_NUM_THREADS']='1'
forker=Forker(); oracle=Oracle()
print('forker', time.monotonic()-t0)
with open_network() as network:
    print('net', time.monotonic()-t0)
    for spec in sys.argv[1:]:
        kind, rule, *rest = spec.split(":")
        t=time.monotonic()
        plan=plan_one(kind, rule, seed=int(rest[0]) if rest else 0)
        if 1:
            f = tempfile.mkdtemp(prefix="mxj")
            job=Job(plan,network,forker,Path(f)/"job")
            rec=job.run(limit_s=45)
            wrong=oracle.judge(rec)
        print(f"== {spec} {time.monotonic()-t:.2f}s stall {longest_stall_s(rec):.2f} faults {[(i['kind'],i['rank']) for i in rec.injected]} plan {plan.faults} statuses {rec.statuses} steps {max((e['step'] for e in rec.events if e['event']=='step'),default=0)} invalid {invalid(rec)} ready {[round(e['at_s']-rec.began_s,2) for e in rec.events if e['event']=='ready']} last {round(rec.ended_s-rec.began_s,2)}")
        for r in rec.statuses:
            print('   ', r, [(e['event'], e.get('kind'), e.get('text','')[:400]) for e in rec.of(r,'error','done','warning','unsaved')])
        for w in wrong: print('  WRONG', w[:1500])
forker.end()
