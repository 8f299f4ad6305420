-- Formulas as MathML without the TeX that pandoc keeps beside it: the search would find each formula twice.
local function plain_operators(tex)    -- browsers put spaces around the names of functions: "PR = 1", "1/PR,"
  tex = tex:gsub("\\operatorname{(%a+)}%s*([%a\\])", "\\mathrm{%1}\\,%2")
  return (tex:gsub("\\operatorname{(%a+)}", "\\mathrm{%1}"))
end

-- A bracket is as tall as its line unless TeX asks for more: pandoc marks each as stretchy, and browsers draw it too large.
local function as_tall_as_its_line(attributes, sign)
  if attributes:find("size") then return nil end    -- \big and its like
  return "<mo" .. attributes:gsub(' stretchy="%a+"', "") .. ' stretchy="false">' .. sign .. "</mo>"
end

function Math(formula)
  if not FORMAT:match("html") then return nil end
  local tex, number = formula.text:match("^(.-)%s*\\qquad(%(%d+%))%s*$")
  local source = plain_operators(tex or formula.text)
  local made = pandoc.Pandoc({ pandoc.Plain({ pandoc.Math(formula.mathtype, source) }) })
  local html = pandoc.write(made, "html", { html_math_method = "mathml" })
  html = html:gsub("<annotation.-</annotation>", ""):gsub("</?semantics>", "")
  if not source:find("\\left", 1, true) then
    html = html:gsub("<mo([^>]*)>([%(%)%[%]])</mo>", as_tall_as_its_line)
  end
  if number then html = '<span class="numbered">' .. html .. '<span class="number">' .. number .. "</span></span>" end
  return pandoc.RawInline("html", html)
end
