from hgms.generators.penalty.dynamic_barrier import DynamicBarrier as DynamicBarrier
from hgms.generators.penalty.fully_first_order import FullyFirstOrder as FullyFirstOrder
from hgms.generators.penalty.gradient_norm import GradientNorm as GradientNorm
from hgms.generators.penalty.minimax import Minimax as Minimax
from hgms.generators.penalty.moreau_envelope import MoreauEnvelope as MoreauEnvelope
from hgms.generators.penalty.ramp import Ramp as Ramp
from hgms.generators.penalty.value_free import ValueFree as ValueFree
from hgms.generators.penalty.value_gap import ValueGap as ValueGap
