"""Scripts with defects, as text. The line of a defect ends with a comment that names it."""

HEAD = """
import atexit, functools, gc, json, logging, os, signal, subprocess, sys, threading, time
import torch
import torch.distributed as dist
import inprocess
from torch.optim.optimizer import register_optimizer_step_post_hook

def saved():
    return json.load(open("step.json")) if os.path.exists("step.json") else 0

def save(step):
    if dist.get_rank() == 0:
        with open("step.json.new", "w") as file:
            json.dump(step, file)
        os.replace("step.json.new", "step.json")

def work(step):
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()
"""

CLEAN = """
REGISTRY = []

@inprocess.Wrapper()
def train(steps, call: inprocess.CallWrapper = None):
    dist.init_process_group("gloo")
    REGISTRY.clear()
    for step in range(saved(), steps):
        call.ping()
        REGISTRY.append(step)
        work(step)
        save(step + 1)
    dist.destroy_process_group()
    return step

train(12)
"""

#: everything that can be left behind
GROWS = """
MODEL = torch.nn.Linear(2, 2)
FILES, LISTENERS = [], {}

@functools.lru_cache(maxsize=None)  # results in the cache of __main__.cached
def cached(call):
    return 1

class Importer:
    def find_spec(self, *args):
        return None

def handle(*args):
    pass

@inprocess.Wrapper()
def train(steps, call: inprocess.CallWrapper = None):
    dist.init_process_group("gloo")
    key = object()
    threading.Thread(target=threading.Event().wait, name="loader", daemon=True).start()  # threads
    FILES.append(open(f"log{call.iteration}", "a"))  # descriptors
    subprocess.Popen(["sleep", "100"])  # children
    LISTENERS[key] = 1  # containers
    cached(key)
    MODEL.register_forward_hook(handle)  # hooks of __main__.MODEL
    MODEL.weight.register_hook(handle)  # hooks of __main__.MODEL
    torch.nn.modules.module.register_module_forward_hook(handle)  # hooks of all modules
    register_optimizer_step_post_hook(handle)  # hooks of all optimizers
    atexit.register(handle)  # functions registered with atexit
    logging.getLogger("training").addHandler(logging.NullHandler())  # handlers of loggers
    sys.path.append(f"plugins{call.iteration}")  # entries in sys.path
    sys.meta_path.append(Importer())  # importers in sys.meta_path
    gc.callbacks.append(handle)  # functions in gc.callbacks
    signal.signal(signal.SIGUSR1, lambda *args: key)  # different handlers of SIGUSR1
    sys.excepthook = lambda *args: key  # different values of sys.excepthook
    for step in range(saved(), steps):
        call.ping()
        work(step)
        save(step + 1)
    dist.destroy_process_group()

train(12)
"""

#: a group that is kept; and half a file, which shows in the steps, not in an error
HIDES = """
GROUPS = {}

def metrics():
    if "metrics" not in GROUPS:
        GROUPS["metrics"] = dist.new_group()  # group-kept
    return GROUPS["metrics"]

def steps_so_far():
    try:
        return int(open("steps.txt").read())
    except (OSError, ValueError):
        return 0

@inprocess.Wrapper()
def train(steps, call: inprocess.CallWrapper = None):
    dist.init_process_group("gloo")
    for step in range(steps_so_far(), steps):
        call.ping()
        work(step)
        dist.all_reduce(torch.ones(1), group=metrics())
        if dist.get_rank() == 0:
            open("steps.txt", "w").write(str(step + 1))  # checkpoint
    dist.destroy_process_group()

train(12)
"""

#: steps are counted by the optimizer, nothing is kept, everything is slow; it writes somewhere else
HABITS = """
@inprocess.Wrapper(soft_timeout=1.5)
def train(steps):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        time.sleep(1.0 if step == 2 else 0.0)
        optimizer.step()
        open(os.environ["ELSEWHERE"], "a").close()  # files
    return step

train(6)
"""

#: no hang can be interrupted; a world size that is taken for granted; results that depend on restarts
FIXED = """
RUNS = 0

@inprocess.Wrapper()
def train(steps, call: inprocess.CallWrapper = None):
    global RUNS
    RUNS += 1
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2  # fewer-ranks
    for step in range(saved(), steps):
        call.ping()
        work(step)
        save(step + 1)
    dist.destroy_process_group()
    return RUNS

train(12)
"""

#: a hang that no timeout notices
UNPROTECTED = CLEAN.replace("        call.ping()", "        with call.disable_hang_protection(): call.ping()  # hang")

#: which waits for a process that replaces the one that died
WAITS = "from inprocess.initialize import RetryController\n" + CLEAN.replace(
    "Wrapper()", "Wrapper(initialize=RetryController(min_world_size=2, wait_for_replacement=60))"
)

#: what is made in the first run alone
ONCE = """
@inprocess.Wrapper()
def train(steps, call: inprocess.CallWrapper = None):
    if call.iteration == 0:
        dist.init_process_group("gloo")
    for step in range(steps):
        call.ping()
        dist.all_reduce(torch.ones(1))  # restart

train(12)
"""

#: an error of a step that is dropped
CATCHES = CLEAN.replace(
    "        call.ping()\n",
    "        try:\n            call.ping()\n        except Exception:  # swallows\n            pass\n",
)

#: a rank that lets no interruption out of a step
SWALLOWS = CLEAN.replace(
    "        work(step)\n",
    """
        try:
            time.sleep(0.1)
            work(step)
        except BaseException:  # swallows
            continue
""",
)

#: groups that are made at import
AT_IMPORT = """
dist.init_process_group("gloo")  # group-outside
METRICS = dist.new_group([0, 1])  # group-outside

@inprocess.Wrapper()
def train(steps, call: inprocess.CallWrapper = None):
    for step in range(saved(), steps):
        call.ping()
        dist.all_reduce(torch.ones(1), group=METRICS)
        work(step)
        save(step + 1)

train(12)
"""

UNWRAPPED = "print('nothing')"
DISABLED = """
@inprocess.Wrapper(enabled=False)  # wrapper
def train(call: inprocess.CallWrapper = None):
    call.ping()

train()
"""
FAILS = "json.loads('{')  # ends"
DIES = "os.kill(os.getpid(), signal.SIGKILL)"
STANDS = """
@inprocess.Wrapper()
def train():
    threading.Event().wait()  # ends

train()
"""
WRITES_BEHIND_A_LINK = CLEAN.replace(
    "        save(step + 1)\n",
    """        save(step + 1)
        if dist.get_rank() == 0:
            torch.save(step, "checkpoints.txt/last.pt")
""",
)
